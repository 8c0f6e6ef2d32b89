"""A Hugging Face causal LM as the learner needs it: logprobs of chosen tokens, and its weights under their names on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor

from towline.delta.state import ModelState, RawTensor, TensorSpec
from towline.errors import UsageError

transformers.utils.logging.disable_progress_bar()

TORCH_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
SAFETENSORS_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
PUBLISH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PACKING_TOLERANCE = 1e-3
"""Of log-softmax in fp32: a wrong mask changes it by far more, another order of sums by far less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The policy tokens of a padded micro batch of B rows of at most T tokens; N of them, row by row."""

    inputs: Tensor
    """i64[B, T-1]; padding on the right, which a causal model's earlier positions don't see."""
    positions: Tensor
    """bool[B, T-1]: the next token was the policy's."""
    targets: Tensor
    """i64[N]"""
    temperatures: Tensor
    """f32[N]"""
    places: Tensor | None = None
    """i64[B, T-1]: positions within each of several sequences on a line; None where a line is one sequence."""


class CausalModel:
    """The model of `folder` in fp32 on `device`, without dropout, so that it computes what the engine computed.

    `autocast` is the dtype of the matrix products of a training pass; the weights stay fp32.
    """

    def __init__(self, folder: Path, device: str, autocast: torch.dtype = torch.float32) -> None:
        self.names = tensor_names(folder)
        try:
            module = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
            )
        except (OSError, ValueError, KeyError) as error:
            line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UsageError(f"model {folder}: {line}", code="model_load") from error
        self.module: Any = module.to(device).eval()
        self.device = torch.device(device)
        self.forward: Any = self.module
        """What a training pass calls: the module, or a wrapper around it."""
        self._autocast = autocast
        known = self.module.state_dict()
        missing = [name for name in self.names if name not in known]
        if missing:
            raise UsageError(
                f"model {folder}: {self.module.config.model_type} names its tensors otherwise in memory ({missing[0]}); "
                "the torch backend needs one whose names are the file's",
                code="model_names",
            )

    @property
    def vocabulary(self) -> int:
        return int(self.module.get_input_embeddings().weight.shape[0])

    def parameters(self) -> dict[str, Any]:
        """Name -> parameter; tied ones once."""
        return dict(self.module.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the folder's files name, in their order."""
        known = self.module.state_dict()
        return {name: known[name] for name in self.names}

    def log_softmax(self, chosen: Chosen) -> Tensor:
        """f32[N, V] at each token's temperature: a training pass."""
        dtype = self._autocast
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
            return self._log_softmax(chosen, self.forward)

    def _log_softmax(self, chosen: Chosen, forward: Any, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        head = self.module.get_output_embeddings()
        # Only the chosen positions go through the output layer: the logits are the largest tensor of all. A hook, so that what a
        # model does to its logits afterwards (soft caps, scales) stays in.
        handle = head.register_forward_pre_hook(lambda _, args: (args[0][chosen.positions], *args[1:]))
        arguments = {"input_ids": chosen.inputs, "use_cache": False}
        if chosen.places is not None:
            arguments["position_ids"] = chosen.places
        try:
            if weights is None:
                logits = forward(**arguments).logits
            else:
                logits = torch.func.functional_call(self.module, dict(weights), kwargs=arguments, tie_weights=True).logits
        finally:
            handle.remove()
        logits = logits.float()
        if not bool((chosen.temperatures == 1).all()):
            logits = logits / chosen.temperatures[:, None]
        return torch.log_softmax(logits, -1)

    def check_packing(self) -> None:
        """`UsageError` unless two sequences on one line give what each gives alone."""
        vocabulary = self.vocabulary
        first, second = ([(start + 3 * place) % vocabulary for place in range(8)] for start in (1, 2))
        ids = torch.tensor([first + second], device=self.device)
        chosen = Chosen(
            inputs=ids,
            positions=torch.ones_like(ids, dtype=torch.bool),
            targets=ids[0],
            temperatures=torch.ones(16, device=self.device),
            places=torch.arange(8, device=self.device).repeat(2)[None],
        )
        apart = Chosen(
            inputs=ids.reshape(2, 8),
            positions=torch.ones(2, 8, dtype=torch.bool, device=self.device),
            targets=ids[0],
            temperatures=chosen.temperatures,
        )
        with torch.no_grad():
            packed, wanted = (self._log_softmax(each, self.module) for each in (chosen, apart))
        if not torch.allclose(packed, wanted, atol=PACKING_TOLERANCE, rtol=0):
            raise UsageError(
                f"trainer.packing: {self.module.config.model_type} doesn't keep rows on one line apart; set it to false",
                code="packing",
            )

    def sequence_logprobs(self, tokens: Sequence[int], state: ModelState | None) -> list[float]:
        """Of tokens[1:] at temperature 1, in fp32, under the model's own weights or under `state`."""
        if len(tokens) < 2:
            return []
        ids = torch.tensor([list(tokens)], dtype=torch.int64, device=self.device)
        chosen = Chosen(
            inputs=ids[:, :-1],
            positions=torch.ones_like(ids[:, :-1], dtype=torch.bool),
            targets=ids[0, 1:],
            temperatures=torch.ones(len(tokens) - 1, device=self.device),
        )
        weights = None
        if state is not None:
            known = self.module.state_dict()
            weights = {name: from_raw(raw).to(self.device, known[name].dtype) for name, raw in state.items()}
        with torch.no_grad():
            logprobs = pick(self._log_softmax(chosen, self.module, weights), chosen.targets)
        return [float(value) for value in logprobs]


def pick(log_softmax: Tensor, targets: Tensor) -> Tensor:
    """f32[N] of f32[N, V] at i64[N]."""
    return log_softmax.gather(1, targets[:, None])[:, 0]


def tensor_names(folder: Path) -> list[str]:
    """The tensors in the folder's safetensors files, sorted; `UsageError` where there are none, or one can't be read."""
    names: set[str] = set()
    for path in safetensors_files(folder):
        try:
            with safe_open(path, "pt") as file:
                names.update(file.keys())
        except SafetensorError as error:
            raise UsageError(f"{path}: not a safetensors file: {error}", code="model_load") from error
    return sorted(names)


def safetensors_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"model {folder}: no *.safetensors; convert the weights with save_pretrained", code="model_load")
    return files


def to_raw(name: str, tensor: Tensor) -> RawTensor:
    """The tensor's bytes. They share memory with a contiguous CPU tensor."""
    flat = tensor.detach().cpu().contiguous()
    data = flat.reshape(-1).view(torch.uint8).numpy()
    return RawTensor(TensorSpec(name, SAFETENSORS_NAMES[tensor.dtype], tuple(tensor.shape)), data)


def from_raw(raw: RawTensor) -> Tensor:
    """A copy of the bytes as a CPU tensor."""
    data = torch.from_numpy(np.array(raw.data))
    return data.view(TORCH_DTYPES[raw.spec.dtype]).reshape(raw.spec.shape)


def published(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in host memory; floating ones in `dtype`."""
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
