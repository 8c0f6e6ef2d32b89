"""The live weights of a Hugging Face module under their published names: written in place, read back bit for bit.

The published dtype may be narrower than the engine's (bf16 in a float32 engine): widening is exact, so casting the live
weights back gives the published bytes, and the digest over them proves what the engine serves. Narrowing is refused.

What changes is found while the engine still generates, by comparing the live weights with the version's. The pause is then
the writing of those elements, or where a tensor changed in many places, the exchange of its memory for another that was
filled beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
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


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_ELEMENTS = 1 << 20
_SWAP_SHARE, _CPU_SWAP_SHARE = 0.1, 0.005
"""Of a tensor's elements: where more have changed, its memory is exchanged. A CPU pays a cache line for each that it writes."""


@dataclass(slots=True)
class Patch:
    """What one live tensor becomes: new values of the elements at `positions` (int64[n], of the flat tensor), or all of it new
    (`positions` None), in memory of its own that `write` exchanges for the live one's. That one is kept until the patch goes."""

    live: torch.Tensor
    positions: torch.Tensor | None
    values: torch.Tensor
    replaced: torch.Tensor | None = None

    def write(self) -> None:
        if self.positions is None:
            self.replaced = self.live.data
            self.live.data = self.values
            return
        flat = self.live.data.view(-1)
        if flat.device.type == "cpu":
            # numpy's is faster than index_copy_ on one thread; as bits, since it has no bfloat16.
            bits = _BITS[flat.itemsize]
            flat.view(bits).numpy()[self.positions.numpy()] = self.values.view(bits).numpy()
        else:
            flat.index_copy_(0, self.positions, self.values)


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


def own_memory(module: torch.nn.Module) -> None:
    """Give each tensor contiguous memory of its own. transformers may have left them mapped from the files that they were loaded
    from, which change, and whose pages a write would have to copy first."""
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


class LiveWeights:
    """A module's tensors by published name. `layout` is the published one; two names may share a tensor (tied weights)."""

    def __init__(self, module: torch.nn.Module, layout: Iterable[TensorSpec], swap_share: float | None = None) -> None:
        # The parameters themselves, not views of their memory, which may be exchanged.
        self._tensors: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
        on_cpu = next(module.parameters()).device.type == "cpu"
        self._swap_share = (_CPU_SWAP_SHARE if on_cpu else _SWAP_SHARE) if swap_share is None else swap_share
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

    def prepare(self, state: ModelState, changed: set[str] | None) -> list[Patch]:
        """Check everything and find what differs from the live weights, which must not change until `write`."""
        self.adopt(tensor.spec for tensor in state.values())
        names = state.keys() if changed is None else changed
        if unknown := sorted(names - state.keys()):
            raise EngineError(f"changed tensor {unknown[0]!r} isn't in the version", code="weights_layout")
        self._check_ties(state, names)
        return [patch for name in sorted(names) if (patch := self._patch(state[name])) is not None]

    def write(self, patches: list[Patch]) -> None:
        """Widening is exact."""
        for patch in patches:
            patch.write()

    def _patch(self, tensor: RawTensor) -> Patch | None:
        """None where the live tensor has these bytes already."""
        published, live = _TORCH[tensor.spec.dtype], self._tensors[tensor.spec.name]
        flat = live.data.view(-1)
        width, most, found = published.itemsize, self._swap_share * flat.numel(), 0
        positions, values = [], []
        for at in range(0, flat.numel(), _CHUNK_ELEMENTS):
            new = _tensor(tensor.data[at * width : (at + _CHUNK_ELEMENTS) * width], published).to(flat.device)
            where = _differing(flat[at : at + _CHUNK_ELEMENTS].to(published), new, width)
            found += where.numel()
            if found > most:
                whole = _tensor(tensor.data, published).to(flat.device, flat.dtype).view(live.shape)
                return Patch(live, None, whole)
            if where.numel():
                positions.append(where + at)
                values.append(new[where].to(flat.dtype))
        return Patch(live, torch.cat(positions), torch.cat(values)) if found else None

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


def _differing(a: torch.Tensor, b: torch.Tensor, width: int) -> torch.Tensor:
    """Positions of the elements whose bytes differ: int64[n]."""
    a, b = a.view(_BITS[width]), b.view(_BITS[width])
    if a.device.type != "cpu":
        return torch.nonzero(a != b)[:, 0]
    # numpy scans ten times as fast as torch.nonzero here.
    return torch.from_numpy(np.flatnonzero(a.numpy() != b.numpy()))


def _tensor(data: npt.NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    """A copy: torch has no read-only tensors, and the data may be mapped from a file."""
    return torch.from_numpy(data.copy()).view(dtype)
