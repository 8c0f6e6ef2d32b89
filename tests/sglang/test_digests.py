"""The digest over ranks, from their slices' digests: the version's for exactly the version's bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash

from towline.delta.state import ModelState, RawTensor, TensorSpec, model_digest, tensor_digests
from towline.engine.sglang.digests import live_digest

SHAPES: dict[str, tuple[int, ...]] = {"rows": (6, 4), "columns": (4, 6), "norm": (4,), "scale": (), "vocabulary": (5, 3)}
HELD = {
    "rows": [(0, 0, 3), (0, 3, 3)], "columns": [(1, 0, 3), (1, 3, 3)], "norm": [(0, 0, 4)] * 2, "scale": [(0, 0, 0)] * 2,
    # Padded to 8 rows: the second rank's last three are nobody's.
    "vocabulary": [(0, 0, 4), (0, 4, 1)],
}  # fmt: skip


def values() -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(np.arange(np.prod(shape), dtype="<f4").reshape(shape)) for name, shape in SHAPES.items()}


def state_of(arrays: dict[str, np.ndarray[Any, Any]]) -> ModelState:
    return {
        name: RawTensor(TensorSpec(name, "F32", array.shape), np.frombuffer(array.tobytes(), np.uint8))
        for name, array in arrays.items()
    }


def answers(*ranks: dict[str, np.ndarray[Any, Any]]) -> list[dict[str, list[Any]]]:
    """Each rank's, from the arrays that it holds."""
    out: list[dict[str, list[Any]]] = []
    for rank, arrays in enumerate(ranks):
        out.append({})
        for name, array in arrays.items():
            dim, start, length = HELD[name][rank]
            part = array if not array.shape else np.moveaxis(np.moveaxis(array, dim, 0)[start : start + length], 0, dim)
            out[-1][name] = [dim, start, length, xxhash.xxh3_128_hexdigest(part.tobytes())]
    return out


def test_ranks_that_hold_the_version_have_its_digest() -> None:
    state = state_of(values())
    assert live_digest(answers(values(), values()), state) == model_digest(tensor_digests(state))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", list(SHAPES))
def test_one_ulp_on_one_rank_is_another_digest(name: str, rank: int) -> None:
    held = [values(), values()]
    dim, start, length = HELD[name][rank]
    at = tuple(start + length - 1 if axis == dim else 0 for axis in range(len(SHAPES[name])))
    held[rank][name][at] = np.nextafter(held[rank][name][at], np.float32(9e9), dtype=np.float32)
    state = state_of(values())
    assert live_digest(answers(*held), state) != model_digest(tensor_digests(state))


def test_slices_that_leave_a_gap_are_another_digest() -> None:
    state, held = state_of(values()), answers(values(), values())
    del held[1]["rows"]
    assert live_digest(held, state) != model_digest(tensor_digests(state))
    held = answers(values(), values())
    held[1]["rows"][1] = 2
    assert live_digest(held, state) != model_digest(tensor_digests(state))
