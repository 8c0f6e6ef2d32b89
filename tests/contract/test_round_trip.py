"""Any well-formed message survives the wire bit for bit."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from contract import samples
from towline.contract.arrays import pack, unpack
from towline.contract.codec import encode
from towline.contract.control import BatchRecord, BatchRow, decode_control
from towline.contract.task import VersionSpan
from towline.contract.trajectory import Segment, Trajectory, decode_trajectory, encode_trajectory

FINITE_LOGPROB = st.floats(max_value=0.0, min_value=-(2.0**100), width=32)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Alternating turns; each policy turn's tokens are cut into spans at random."""
    turns = draw(st.lists(st.tuples(st.sampled_from(["policy", "tool", "environment"]), st.integers(1, 400)), max_size=6))
    turns = [("prompt", draw(st.integers(1, 50))), *turns, ("policy", draw(st.integers(1, 700)))]
    segments, spans, position = [], [], 0
    version, mask = draw(st.integers(0, 2**40)), []
    for kind, length in turns:
        segments.append(Segment(position, position + length, kind))
        if kind == "policy":
            cut = draw(st.integers(0, length - 1))
            for start, end in ((0, cut), (cut, length)):
                if start < end:
                    how = draw(st.sampled_from(["retract", "in_place"])) if spans else "start"
                    spans.append(VersionSpan(position + start, position + end, version, how))
                    version += draw(st.integers(0, 3))
        mask += [int(kind == "policy")] * length
        position += length
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    loss_mask = np.array(mask, np.uint8)
    edge = np.float32(draw(FINITE_LOGPROB))
    chosen = np.where(rng.random(position) < 0.1, edge, -rng.exponential(size=position)).astype(np.float32)
    return samples.trajectory(
        tokens=rng.integers(0, 2**31 - 1, position, dtype=np.int64).astype(np.int32),
        loss_mask=loss_mask,
        logprobs=np.where(loss_mask == 1, chosen, np.float32(np.nan)),
        version_spans=tuple(spans),
        segments=tuple(segments),
    )


@given(trajectories())
@settings(max_examples=150, deadline=None)
def test_a_trajectory_comes_back_bit_for_bit(trajectory: Trajectory) -> None:
    data = encode_trajectory(trajectory)
    assert samples.same(decode_trajectory(data), trajectory)
    assert encode_trajectory(decode_trajectory(data)) == data


@given(st.binary(max_size=4096), st.booleans())
@settings(deadline=None)
def test_float_bits_survive_nan_payloads_included(raw: bytes, compress: bool) -> None:
    values = np.frombuffer(raw[: len(raw) // 4 * 4], "<f4")
    assert unpack(pack(values, "<f4", compress=compress), "<f4", "x").tobytes() == values.tobytes()


@given(
    st.lists(
        st.builds(
            BatchRow,
            *[st.integers(0, 2**62)] * 3,
            st.binary(min_size=16, max_size=16),
            st.floats(allow_nan=False),
            st.integers(0, 10**6),
            st.integers(1, 10**6),
        ),
        max_size=40,
    )
)
def test_a_batch_record_comes_back(rows: list[BatchRow]) -> None:
    record = BatchRecord(writer="w/1", epoch=1, for_depth=2, rows=tuple(rows), at=0.5)
    assert decode_control(encode(record)) == record
