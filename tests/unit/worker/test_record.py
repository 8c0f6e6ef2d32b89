"""A sample that was cut anywhere and gone on with elsewhere is, in the end, the sample that it would have been."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from contract import samples
from towline.contract.partial import decode_partial, encode_partial
from towline.contract.task import VersionSpan
from towline.contract.trajectory import check_trajectory
from towline.engine.base import Progress
from towline.rollout_worker.record import Record


def piece(tokens: list[int], versions: list[int]) -> Progress:
    """Tokens with a version each; logprobs tell tokens apart."""
    spans: list[VersionSpan] = []
    for at, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(spans[-1].start, at + 1, version, spans[-1].cut)
        else:
            spans.append(VersionSpan(at, at + 1, version, "retract" if spans else "start"))
    return Progress(
        tokens=tokens, logprobs=[-token / 100 for token in tokens], spans=spans, queue_seconds=0.0, generate_seconds=1.0
    )


def whole(turns: list[tuple[list[int], list[int], list[int]]]) -> Record:
    record = Record()
    record.answer([1, 2, 3], "prompt")
    for tokens, versions, answer in turns:
        record.take(piece(tokens, versions), "stop")
        record.answer(answer, "tool")
    return record


def handed_over(record: Record) -> Record:
    """By way of the bus."""
    partial = samples.partial(
        tokens=np.array(record.tokens, np.int32), logprobs=record.all_logprobs, version_spans=tuple(record.spans),
        segments=tuple(record.segments), turn=record.turn, queue_seconds=record.queue_seconds,
        generate_seconds=record.generate_seconds,
    )  # fmt: skip
    return Record.of(decode_partial(encode_partial(partial)))


@st.composite
def turns(draw: st.DrawFn) -> list[tuple[list[int], list[int], list[int]]]:
    """Some turns' tokens, the version of each token (they only rise), and the answers, which may be empty."""
    made, version = [], draw(st.integers(0, 5))
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(st.lists(st.integers(1, 99), min_size=1, max_size=12))
        versions = []
        for _ in tokens:
            version += draw(st.sampled_from([0, 0, 0, 1]))
            versions.append(version)
        made.append((tokens, versions, draw(st.lists(st.integers(1, 99), max_size=3))))
    return made


@given(turns(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_cut_anywhere_changes_nothing_but_how_a_span_at_the_cut_began(
    given_turns: list[tuple[list[int], list[int], list[int]]], data: st.DataObject
) -> None:
    want = whole(given_turns)
    record = Record()
    record.answer([1, 2, 3], "prompt")
    for tokens, versions, answer in given_turns:
        at, cuts = 0, sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=3)) | {len(tokens)})
        for cut in cuts:
            record.take(piece(tokens[at:cut], versions[at:cut]), "stop" if cut == len(tokens) else "open")
            record, at = handed_over(record), cut
        record.answer(answer, "tool")
        record = handed_over(record)
    assert (record.tokens, record.segments) == (want.tokens, want.segments)
    np.testing.assert_array_equal(record.all_logprobs, want.all_logprobs)
    assert [(span.start, span.end, span.version) for span in record.spans] == [
        (span.start, span.end, span.version) for span in want.spans
    ]
    check_trajectory(
        dataclasses.replace(
            samples.trajectory(), tokens=np.array(record.tokens, np.int32), loss_mask=record.mask,
            logprobs=record.all_logprobs, version_spans=tuple(record.spans), segments=tuple(record.segments),
        )
    )  # fmt: skip


def test_what_is_told_of_a_running_turn_leaves_the_record_as_it_was() -> None:
    record = whole([([5, 6], [0, 0], [7])])
    before = dataclasses.astuple(record)
    told = record.with_turn(piece([8, 9], [0, 1]))
    assert dataclasses.astuple(record) == before
    assert told.tokens == [*record.tokens, 8, 9]
    assert told.turn == "open"
    assert [span.cut for span in told.spans] == ["start", "start", "retract"]
    assert told.sampled_here == {0, 1}
    assert handed_over(told).sampled_here == frozenset()
