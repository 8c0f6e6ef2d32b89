"""The live weights of a Hugging Face module under their published names: written in place, read back bit for bit.

The published dtype may be narrower than the engine's (bf16 in a float32 engine): widening is exact, so casting the live
weights back gives the published bytes, and the digest over them proves what the engine serves. Narrowing is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors import safe_open

from towline.delta.state import ModelState, RawTensor, TensorSpec, model_digest
from towline.errors import EngineError, UsageError

_TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_EXACT = {
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64), (torch.float32, torch.float64),
}  # fmt: skip


def folder_layout(folder: Path) -> list[TensorSpec]:
    """The specs of a folder's safetensors, from their headers alone."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder}: no .safetensors file; save the model with safe serialisation", code="model_files")
    layout = []
    for path in files:
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                view = tensors.get_slice(name)
                layout.append(TensorSpec(name, view.get_dtype(), tuple(view.get_shape())))
    return sorted(layout)


class LiveWeights:
    """A module's tensors by published name. `layout` is the published one; two names may share a tensor (tied weights)."""

    def __init__(self, module: torch.nn.Module, layout: Iterable[TensorSpec]) -> None:
        self._tensors: dict[str, torch.Tensor] = module.state_dict(keep_vars=False)
        self._layout: dict[str, TensorSpec] = {}
        self.adopt(layout)

    def adopt(self, layout: Iterable[TensorSpec]) -> None:
        """Take the layout as the published one, or raise `EngineError`: it must fit the module exactly and cover all of it."""
        specs = {spec.name: spec for spec in layout}
        if unknown := sorted(specs.keys() - self._tensors.keys()):
            raise EngineError(f"the model has no tensor {unknown[0]!r} ({len(unknown)} such names)", code="weights_layout")
        covered = {self._tensors[name].data_ptr() for name in specs}
        if missing := [name for name, tensor in self._tensors.items() if tensor.data_ptr() not in covered]:
            raise EngineError(f"the version lacks tensor {missing[0]!r} ({len(missing)} such names)", code="weights_layout")
        for spec in specs.values():
            live, published = self._tensors[spec.name], _TORCH.get(spec.dtype)
            if spec.shape != tuple(live.shape):
                raise EngineError(
                    f"tensor {spec.name!r} has the shape {list(spec.shape)}, the model's is {list(live.shape)}",
                    code="weights_layout",
                )
            if published != live.dtype and (published, live.dtype) not in _EXACT:
                raise EngineError(
                    f"tensor {spec.name!r} is published as {spec.dtype}, which a {live.dtype} engine can't hold exactly; "
                    "set rollout.dtype to the published dtype or a wider one",
                    code="weights_dtype",
                )
        self._layout = specs

    def prepare(self, state: ModelState, changed: set[str] | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Check everything and return (live tensor, new value in the published dtype) pairs for `write`. Nothing is written."""
        self.adopt(tensor.spec for tensor in state.values())
        names = state.keys() if changed is None else changed
        if unknown := sorted(names - state.keys()):
            raise EngineError(f"changed tensor {unknown[0]!r} isn't in the version", code="weights_layout")
        self._check_ties(state, names)
        return [(self._tensors[name], _as_torch(state[name])) for name in names]

    def write(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """In place; the widening copy is exact."""
        for live, value in pairs:
            live.copy_(value)

    def digest(self) -> str:
        """Model digest over the live weights, each cast back to its published dtype."""
        digests = {}
        for name, spec in self._layout.items():
            value = self._tensors[name].detach().reshape(-1).to(_TORCH[spec.dtype])
            digests[name] = xxhash.xxh3_128_hexdigest(value.view(torch.uint8).cpu().numpy().data)
        return model_digest(digests)

    def _check_ties(self, state: Mapping[str, RawTensor], names: Iterable[str]) -> None:
        owner: dict[int, str] = {}
        for name in state:
            first = owner.setdefault(self._tensors[name].data_ptr(), name)
            if first != name and (first in names or name in names) and not np.array_equal(state[first].data, state[name].data):
                raise EngineError(f"tensors {first!r} and {name!r} are tied in the model but differ", code="weights_tied")


def _as_torch(tensor: RawTensor) -> torch.Tensor:
    data = tensor.data if tensor.data.flags.writeable else tensor.data.copy()
    return torch.from_numpy(data).view(_TORCH[tensor.spec.dtype]).reshape(tensor.spec.shape)
