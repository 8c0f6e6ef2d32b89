"""A model's weights as named byte arrays, and the digests that identify them.

Dtypes carry their safetensors names ("BF16", "F32", …), since numpy has no bfloat16 or fp8: a tensor is its bytes, little
endian, in row-major order, and everything here is bit-exact. No torch is needed to read, compare or hash a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import xxhash

from towline.errors import UsageError

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class TensorSpec:
    """A tensor's name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise UsageError(f"tensor {self.name!r} has the unknown dtype {self.dtype!r}", code="dtype_unknown")

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor's bytes: `data` is uint8[nbytes], contiguous. Whoever holds it decides whether it may be written."""

    spec: TensorSpec
    data: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        if self.data.dtype != np.uint8 or self.data.ndim != 1 or self.data.size != self.spec.nbytes:
            raise UsageError(
                f"tensor {self.spec.name!r} needs uint8[{self.spec.nbytes}], got {self.data.dtype}{list(self.data.shape)}",
                code="tensor_shape",
            )

    def digest(self) -> str:
        """xxh3-128 of the bytes, 32 hex digits."""
        return xxhash.xxh3_128_hexdigest(self.data.data)


ModelState = dict[str, RawTensor]
"""Canonical Hugging Face tensor name -> tensor."""


def layout_of(state: Mapping[str, RawTensor]) -> list[TensorSpec]:
    """The state's tensor specs, by name."""
    return sorted(tensor.spec for tensor in state.values())


def layout_digest(layout: Iterable[TensorSpec]) -> str:
    """sha256 over the sorted [name, dtype, shape] rows as compact JSON; 64 hex digits."""
    rows = [[spec.name, spec.dtype, list(spec.shape)] for spec in sorted(layout)]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def model_digest(tensor_digests: Mapping[str, str]) -> str:
    """sha256 over the sorted [name, tensor digest] rows as compact JSON; 64 hex digits."""
    rows = sorted([name, digest] for name, digest in tensor_digests.items())
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def tensor_digests(state: Mapping[str, RawTensor]) -> dict[str, str]:
    """Tensor name -> digest of its bytes."""
    return {name: tensor.digest() for name, tensor in state.items()}


def copy_state(state: Mapping[str, RawTensor]) -> ModelState:
    """An independent, writable copy."""
    return {name: RawTensor(tensor.spec, tensor.data.copy()) for name, tensor in state.items()}
