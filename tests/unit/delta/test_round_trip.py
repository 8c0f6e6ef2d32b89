"""Every state comes back bit for bit, in every mode, by both backends and by the plain decoder."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from towline.delta import backend
from towline.delta.codec import MODES, allocate, apply, encode
from towline.delta.state import ModelState, copy_state, layout_of, tensor_digests
from unit.delta.plain_decoder import decode
from unit.delta.states import applied, parts_of, random_state, same, seeds, step, tensor

BACKENDS = ["numpy", pytest.param("numba", marks=pytest.mark.skipif(not backend.find_spec("numba"), reason="no numba"))]
modes = st.sampled_from(sorted(MODES))
block_sizes = st.sampled_from([None, 64, 1000, 4096])


@settings(max_examples=40, deadline=None)
@given(
    seed=seeds,
    mode=modes,
    block_bytes=block_sizes,
    threads=st.sampled_from([1, 2]),
    max_part_bytes=st.sampled_from([500, 1 << 28]),
)
def test_a_delta_applied_to_its_base_is_the_new_state(
    seed: int, mode: str, block_bytes: int | None, threads: int, max_part_bytes: int
) -> None:
    rng = np.random.default_rng(seed)
    base = random_state(rng)
    new = step(rng, base)
    before = copy_state(base)
    encoding = encode(base, new, mode=mode, block_bytes=block_bytes, threads=threads, max_part_bytes=max_part_bytes)
    parts = [part.data for part in encoding]
    state = copy_state(base)
    report = apply(state, parts, layout=layout_of(base), digests=tensor_digests(new), threads=threads)
    assert same(state, new)
    assert same(base, before)
    assert encoding.report.digests == report.digests == tensor_digests(new)
    changed = sum(int((base[n].data.reshape(-1, w) != new[n].data.reshape(-1, w)).any(axis=1).sum()) for n, w in _widths(new))
    assert encoding.report.changed == report.changed == changed
    assert encoding.report.elements == sum(t.spec.elements for t in new.values())
    assert encoding.report.wire_bytes == report.wire_bytes == sum(map(len, parts))


def _widths(state: ModelState) -> list[tuple[str, int]]:
    return [(name, t.spec.nbytes // t.spec.elements) for name, t in state.items() if t.spec.elements]


@settings(max_examples=25, deadline=None)
@given(seed=seeds, mode=modes, block_bytes=block_sizes)
def test_the_plain_decoder_reads_what_the_encoder_writes(seed: int, mode: str, block_bytes: int | None) -> None:
    rng = np.random.default_rng(seed)
    base = random_state(rng, tensors=6)
    new = step(rng, base)
    parts = parts_of(base, new, mode=mode, block_bytes=block_bytes)
    plain = decode({name: t.data.tobytes() for name, t in base.items()}, parts)
    assert plain == {name: t.data.tobytes() for name, t in new.items()}


@pytest.mark.skipif(not backend.find_spec("numba"), reason="no numba")
@settings(max_examples=20, deadline=None)
@given(seed=seeds, mode=modes, block_bytes=block_sizes)
def test_numba_and_numpy_write_the_same_bytes(seed: int, mode: str, block_bytes: int | None) -> None:
    rng = np.random.default_rng(seed)
    base = random_state(rng, dtypes=("BF16", "F16", "I16", "F32"))
    new = step(rng, base)
    by_numpy = parts_of(base, new, mode=mode, block_bytes=block_bytes, backend="numpy")
    assert parts_of(base, new, mode=mode, block_bytes=block_bytes, backend="numba", threads=2) == by_numpy
    assert same(applied(base, by_numpy, backend="numba"), new)
    assert same(applied(base, by_numpy, backend="numpy"), new)


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "I16", "U16"])
def test_every_16_bit_pattern_can_become_every_kind_of_other(backend_name: str, mode: str, dtype: str) -> None:
    patterns = np.arange(1 << 16, dtype="<u2")
    rng = np.random.default_rng(5)
    sparse = np.where(rng.random(1 << 16) < 0.05, rng.permutation(patterns), patterns).astype("<u2")
    targets = [patterns ^ 0x8000, patterns + np.uint16(1), rng.permutation(patterns), sparse, patterns]
    for target in targets:
        base, new = ({"w": tensor("w", dtype, (256, 256), data)} for data in (patterns, target))
        parts = parts_of(base, new, mode=mode, backend=backend_name)
        assert same(applied(base, parts, backend=backend_name), new)


@settings(max_examples=15, deadline=None)
@given(seed=seeds, block_bytes=block_sizes)
def test_an_idempotent_delta_finishes_any_half_applied_state(seed: int, block_bytes: int | None) -> None:
    rng = np.random.default_rng(seed)
    base = random_state(rng)
    new = step(rng, base)
    parts = parts_of(base, new, mode="idempotent", block_bytes=block_bytes)
    half = copy_state(base)
    for name, width in _widths(base):
        done = rng.random(base[name].spec.elements) < rng.random()
        half[name].data.reshape(-1, width)[done] = new[name].data.reshape(-1, width)[done]
    assert same(applied(half, parts), new)
    assert same(applied(new, parts), new)


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_a_long_unchanged_stretch_and_a_change_at_either_end(backend_name: str) -> None:
    for size in (255, 256, 257, 511, 70_000, 1 << 21):
        for at in ([], [0], [size - 1], [0, size - 1], [size // 2]):
            old = np.full(size, 0x3C00, "<u2")
            changed = old.copy()
            changed[at] += 1
            base, new = ({"w": tensor("w", "BF16", (size,), data)} for data in (old, changed))
            for mode in MODES:
                assert same(applied(base, parts_of(base, new, mode=mode, backend=backend_name), backend=backend_name), new)


def test_a_full_model_needs_no_base_and_an_empty_one_is_a_part_too() -> None:
    rng = np.random.default_rng(1)
    for state in (random_state(rng, 20), {}):
        parts = parts_of(None, state, block_bytes=4096, max_part_bytes=20_000)
        out = allocate(layout_of(state))
        apply(out, parts, layout=layout_of(state), digests=tensor_digests(state))
        assert same(out, state)


def test_an_unchanged_model_costs_its_table_only() -> None:
    state = random_state(np.random.default_rng(2), 40)
    encoding = encode(state, state)
    size = sum(len(part.data) for part in encoding)
    assert encoding.report.codec == "same"
    assert encoding.report.density == 0
    assert size < 1200 + 16 * len(state)


def test_the_smallest_codec_is_chosen_and_recorded() -> None:
    rng = np.random.default_rng(3)
    weights = (rng.normal(0, 0.02, 200_000).astype("<f4").view("<u4") >> 16).astype("<u2")
    few, many = weights.copy(), weights + rng.integers(1, 4, weights.size).astype("<u2")
    few[rng.random(few.size) * 2.0 ** ((few >> 7) & 255) < 2.0**115] += 1  # an octave less, twice as likely
    base = {name: tensor(name, "BF16", (weights.size,), weights) for name in ("few", "many", "new", "same")}
    new = base | {
        "few": tensor("few", "BF16", few.shape, few),
        "many": tensor("many", "BF16", many.shape, many),
        "new": tensor("new", "BF16", few.shape, rng.integers(0, 1 << 16, few.size).astype("<u2")),
    }
    expected = {"default": ("ulp", "diff"), "dense": ("class", "diff"), "idempotent": ("low2", "low2")}
    for mode, (sparse, wide) in expected.items():
        encoding = encode(base, new, mode=mode, block_bytes=400_000)
        parts = [part.data for part in encoding]
        assert encoding.report.codecs == {"few": sparse, "many": wide, "new": "raw", "same": "same"}
        assert sum(map(len, parts)) < 1.02 * 400_000 * 2
