"""The index of samples says of each what the records say, in whatever order they come, and forgets the oldest."""

from __future__ import annotations

import random

import pytest

from towline.contract.control import BatchRecord, BatchRow, EvalRecord, EvalRow, ForkRecord
from towline.contract.outcome import Score
from towline.contract.task import VersionSpan
from towline.view.samples import Consumed, SampleFilter, SampleIndex

NOTHING = Consumed({}, frozenset())


def digest_of(sequence: int) -> bytes:
    return sequence.to_bytes(16, "little")


def score(sequence: int, group: int, sample: int = 0, **fields) -> Score:
    defaults = {
        "run": "r", "lane": "train", "group": group, "sample": sample, "group_size": 4, "task_sequence": sequence + 100,
        "trajectory_sequence": sequence, "trajectory_digest": digest_of(sequence), "reward": 0.5, "verifier": "v",
        "policy_tokens": 3, "total_tokens": 5, "version_spans": (VersionSpan(2, 5, 1, "start"),), "finish": "stop",
    }  # fmt: skip
    return Score(**(defaults | fields))


def batch(depth: int, *rows: tuple[int, int, int], epoch: int = 1, digest=digest_of) -> BatchRecord:
    listed = tuple(BatchRow(group, sample, sequence, digest(sequence), 0.5, 0, 3) for group, sample, sequence in rows)
    return BatchRecord(writer="w/1", epoch=epoch, for_depth=depth, rows=listed, at=1.0)


def listed(index: SampleIndex, wanted: SampleFilter | None = None, consumed: Consumed = NOTHING, limit: int = 1000):
    return index.select(wanted or SampleFilter(), limit, consumed)[0]


def test_a_batch_that_comes_before_its_scores_is_the_same_as_one_that_comes_after():
    first, second = SampleIndex(64), SampleIndex(64)
    scores = [score(sequence, 7, sequence) for sequence in range(1, 5)]
    record = batch(3, *[(7, sequence, sequence) for sequence in range(1, 5)])
    for one in scores:
        first.score(one, 9.0, dropped=False)
    first.batch(record)
    second.batch(record)
    for one in scores:
        second.score(one, 9.0, dropped=False)
    assert listed(first) == listed(second)
    assert [row.step for row in listed(first)] == [3] * 4


def test_states_follow_the_line():
    index = SampleIndex(64)
    for sequence in range(1, 8):
        index.score(score(sequence, sequence), 1.0, dropped=False)
    index.batch(batch(0, (1, 0, 1)))
    index.batch(batch(1, (2, 0, 2)))
    index.batch(batch(2, (3, 0, 3)))
    index.batch(batch(5, (4, 0, 4)))
    index.batch(batch(3, (7, 0, 7), digest=lambda sequence: b"x" * 16))
    index.evaluation(EvalRecord(writer="w/2", version=1, depth=1, wanted=1, rows=(EvalRow(5, 0, 5, b"", 1.0),), mean=1.0))
    index.drop([6])
    consumed = Consumed({1: (0, 4)}, frozenset({1}))
    states = {row.group: row.state for row in listed(index, consumed=consumed)}
    assert states == {1: "trained", 2: "skipped", 3: "trained", 4: "batched", 5: "evaluated", 6: "dropped", 7: "missing"}
    assert index.counts(consumed) == {
        "trained": 2, "skipped": 1, "batched": 1, "evaluated": 1, "dropped": 1, "missing": 1,
    }  # fmt: skip
    index.fork(ForkRecord(writer="w/3", epoch=9, base=1, depth=2))
    states = {row.group: row.state for row in listed(index, consumed=Consumed({1: (0, 2)}, frozenset({1})))}
    assert (states[1], states[2], states[3], states[4]) == ("trained", "skipped", "scored", "scored")


def test_a_late_score_of_a_dropped_group_is_dropped():
    index = SampleIndex(8)
    index.score(score(1, 1), 1.0, dropped=True)
    assert [row.state for row in listed(index)] == ["dropped"]


def test_only_the_newest_are_kept_and_a_new_one_has_nothing_of_the_one_before_it():
    index = SampleIndex(16)
    for sequence in range(1, 41):
        index.score(score(sequence, sequence, reward=sequence / 100), float(sequence), dropped=False)
        index.batch(batch(sequence, (sequence, 0, sequence))) if sequence <= 30 else None
    rows = listed(index)
    assert [row.sequence for row in rows] == list(range(40, 24, -1))
    assert [row.step for row in rows] == [None] * 10 + list(range(30, 24, -1))
    index.score(score(3, 999), 1.0, dropped=False)
    assert 999 not in {row.group for row in listed(index)}, "an old one took a newer one's place"


def test_a_score_that_is_read_twice_changes_nothing():
    index = SampleIndex(8)
    index.score(score(1, 1), 1.0, dropped=False)
    index.batch(batch(0, (1, 0, 1)))
    before = listed(index)
    index.score(score(1, 1), 1.0, dropped=False)
    assert listed(index) == before


def test_unscored_sequences_are_those_without_a_score():
    index = SampleIndex(8)
    for sequence in (1, 2, 5, 9):
        index.score(score(sequence, sequence), 1.0, dropped=False)
    index.seen(11)
    assert index.unscored(12, 100) == [11, 10, 8, 7, 6, 4]
    assert index.unscored(8, 2) == [7, 6]


FILTERS = [
    (SampleFilter(group=3), lambda row: row.group == 3),
    (SampleFilter(group=3, sample=1), lambda row: (row.group, row.sample) == (3, 1)),
    (SampleFilter(lane="eval"), lambda row: row.lane == "eval"),
    (SampleFilter(lane="nowhere"), lambda row: False),
    (SampleFilter(finish="length"), lambda row: row.finish == "length"),
    (SampleFilter(steps=(2, 4)), lambda row: row.step is not None and 2 <= row.step <= 4),
    (SampleFilter(versions=(3, 5)), lambda row: row.version_start <= 5 and row.version_end >= 3),
    (SampleFilter(reward=(0.25, 0.5)), lambda row: 0.25 <= row.reward <= 0.5),
    (SampleFilter(state="trained"), lambda row: row.state == "trained"),
    (SampleFilter(state="scored", reward=(-9.0, 0.3)), lambda row: row.state == "scored" and row.reward <= 0.3),
    (SampleFilter(before=60), lambda row: row.sequence < 60),
]


@pytest.mark.parametrize(("wanted", "takes"), FILTERS, ids=[str(number) for number in range(len(FILTERS))])
def test_a_filter_takes_what_it_says_and_pages_join_without_a_gap(wanted: SampleFilter, takes):
    rng = random.Random(1)
    index = SampleIndex(128)
    order = list(range(1, 101))
    rng.shuffle(order)
    for sequence in order:
        start = rng.randrange(6)
        spans = (VersionSpan(2, 3, start, "start"), VersionSpan(3, 5, start + rng.randrange(3), "retract"))
        index.score(
            score(sequence, sequence // 8, sequence % 8, lane=rng.choice(["train", "eval"]), version_spans=spans,
                  finish=rng.choice(["stop", "length"]), reward=rng.randrange(9) / 8),
            float(sequence), dropped=False,
        )  # fmt: skip
    for depth in range(6):
        index.batch(batch(depth, *[(s // 8, s % 8, s) for s in range(depth * 9 + 1, depth * 9 + 10)]))
    consumed = Consumed({1: (0, 4)}, frozenset())
    everything = listed(index, consumed=consumed)
    expected = [row for row in everything if takes(row)]
    assert len(everything) == 100
    found, before = [], wanted.before
    while True:
        page, total = index.select(
            SampleFilter(**{**{name: getattr(wanted, name) for name in wanted.__slots__}, "before": before}), 7, consumed
        )
        found += page
        if len(page) < 7:
            break
        before = page[-1].sequence
    assert found == expected
    assert total == len([row for row in everything if wanted.before is not None or takes(row)])
