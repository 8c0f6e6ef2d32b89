"""Folded deltas do what the deltas do one after another, and prove the same final state."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towline.delta.codec import allocate, apply, fold
from towline.delta.state import ModelState, copy_state, layout_of, model_digest, tensor_digests
from towline.errors import UsageError
from unit.delta.states import parts_of, random_state, same, seeds, step, tensor


def digest_of(state: ModelState) -> str:
    return model_digest(tensor_digests(state))


@settings(max_examples=20, deadline=None)
@given(seed=seeds, steps=st.integers(1, 4), block_bytes=st.sampled_from([None, 64, 1000]), full=st.booleans())
def test_a_folded_delta_is_the_deltas_one_after_another(seed: int, steps: int, block_bytes: int | None, full: bool) -> None:
    rng = np.random.default_rng(seed)
    states = [random_state(rng)]
    for _ in range(steps):
        states.append(step(rng, states[-1]))
    deltas = [parts_of(a, b, block_bytes=block_bytes, base_digest=digest_of(a)) for a, b in pairwise(states)]
    if full:
        deltas.insert(0, parts_of(None, states[0], block_bytes=block_bytes))
    folded = fold(deltas, max_part_bytes=3000)
    parts = [part.data for part in folded]
    out = allocate(layout_of(states[0])) if full else copy_state(states[0])
    apply(out, parts, layout=layout_of(states[0]), digests=tensor_digests(states[-1]))
    assert same(out, states[-1])
    assert folded.report.digests == tensor_digests(states[-1])


def test_a_change_and_its_undoing_fold_to_nothing() -> None:
    rng = np.random.default_rng(4)
    old = rng.integers(0, 1 << 16, 5000).astype("<u2")
    where = rng.random(5000) < 0.05
    base = {"w": tensor("w", "BF16", old.shape, old)}
    new = {"w": tensor("w", "BF16", old.shape, np.where(where, old ^ 0x8000, old).astype("<u2"))}
    folded = fold([parts_of(base, new), parts_of(new, base)])
    assert sum(len(part.data) for part in folded) < 700
    assert folded.report.changed == 0


def test_a_fold_is_as_small_as_the_direct_delta() -> None:
    rng = np.random.default_rng(6)
    states = [{"w": tensor("w", "BF16", (60_000,), rng.integers(0x3C00, 0x3E00, 60_000).astype("<u2"))}]
    for _ in range(3):
        bits = states[-1]["w"].data.view("<u2").copy()
        bits[rng.random(bits.size) < 0.01] += 1
        states.append({"w": tensor("w", "BF16", bits.shape, bits)})
    deltas = [parts_of(a, b) for a, b in pairwise(states)]
    assert [part.data for part in fold(deltas)] == parts_of(states[0], states[-1])


def test_what_cannot_fold_is_refused() -> None:
    rng = np.random.default_rng(7)
    a = random_state(rng, 8, ("BF16",))
    b, c = step(rng, a), step(rng, a)
    good = parts_of(a, b, base_digest=digest_of(a))
    for mode in ("dense", "idempotent"):
        old = {"w": tensor("w", "BF16", (20_000,), rng.integers(0x3C00, 0x3C10, 20_000).astype("<u2"))}
        bits = old["w"].data.view("<u2").copy()
        bits[rng.random(bits.size) < 0.05] += 1
        delta = parts_of(old, {"w": tensor("w", "BF16", bits.shape, bits)}, mode=mode)
        if mode == "idempotent":
            with pytest.raises(UsageError, match=r"'w'.*give the base"):
                list(fold([delta, delta]))
    with pytest.raises(UsageError, match="don't follow"):
        list(fold([good, parts_of(c, a, base_digest=digest_of(c))]))
    with pytest.raises(UsageError, match="isn't the same"):
        list(fold([good, parts_of({}, {})]))
    with pytest.raises(UsageError, match="at least one"):
        fold([])
