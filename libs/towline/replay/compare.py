"""How far two states of a model are apart: which tensors' bytes differ, and by how much as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towline.delta.state import RawTensor


@dataclass(frozen=True, slots=True)
class Distance:
    """Largest |a - b| over all floating elements, and the tensor that has it; None where no tensor could be compared."""

    max_abs_diff: float | None
    tensor: str | None


def differing(recorded: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Names of the tensors whose digests differ, or that only one of the two has; sorted."""
    return sorted(name for name in {*recorded, *found} if recorded.get(name) != found.get(name))


def distance(a: Mapping[str, RawTensor], b: Mapping[str, RawTensor]) -> Distance:
    """Over the tensors that both have in the same dtype and shape. Where either has a NaN the other hasn't, it's infinite."""
    worst = Distance(None, None)
    for name in sorted(set(a) & set(b)):
        if a[name].spec != b[name].spec:
            continue
        left, right = as_numbers(a[name]), as_numbers(b[name])
        if left is None or right is None:
            continue
        with np.errstate(invalid="ignore"):  # inf - inf, which are equal
            difference = np.where((left == right) | (np.isnan(left) & np.isnan(right)), 0.0, np.abs(left - right))
        value = float(np.nan_to_num(difference, nan=np.inf).max()) if difference.size else 0.0
        if worst.max_abs_diff is None or value > worst.max_abs_diff:
            worst = Distance(value, name)
    return worst


def as_numbers(tensor: RawTensor) -> npt.NDArray[np.float64] | None:
    """The elements as f64[n]; None for a dtype that isn't BF16, F16, F32 or F64."""
    data = tensor.data
    if tensor.spec.dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    kind = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}.get(tensor.spec.dtype)
    return None if kind is None else data.view(kind).astype(np.float64)
