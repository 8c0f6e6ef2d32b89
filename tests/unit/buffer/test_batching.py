"""Which groups make a batch, in which order, and what is dropped instead."""

from __future__ import annotations

import pytest

from towline.contract.codec import digest
from towline.contract.task import VersionSpan
from unit.buffer.world import World, kinds, started


def test_only_whole_groups_are_batched_once_per_epoch_and_depth() -> None:
    world = started()
    world.scored(0)
    world.outcome(world.score(1, 0))
    assert world.settle() == []
    world.outcome(world.score(1, 1))
    assert kinds(world.settle()) == ["batch"]
    assert world.settle() == []
    batch = world.batches()[0]
    assert (batch.epoch, batch.for_depth) == (1, 0)
    assert [(row.group, row.sample) for row in batch.rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(row.digest == digest(f"{row.group}.{row.sample}".encode()) for row in batch.rows)


def test_no_batch_without_a_trainer() -> None:
    world = World(started().rules)
    world.base()
    world.settle()
    world.scored(*world.open_groups())
    assert world.settle() == []
    world.open()
    assert kinds(world.settle()) == ["fork", "batch"]


def test_the_stalest_groups_go_first() -> None:
    world = started(max_staleness=2, groups_per_batch=2)
    world.scored(0, 1)
    world.settle()
    v1 = world.version()
    world.settle()
    world.scored(2, 3, version=v1)
    world.scored(4, version=0)
    world.settle()
    assert {row.group for row in world.batches()[-1].rows} == {4, 2}
    assert [row.least_depth for row in world.batches()[-1].rows] == [0, 0, 1, 1]


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_a_group_over_the_bound_is_dropped_and_another_admitted(staleness: int) -> None:
    world = started(max_staleness=staleness, groups_per_batch=1, steps=50)
    slow = world.open_groups()[0]
    world.outcome(world.score(slow, 0, 0))
    for depth in range(staleness + 1):
        assert slow in world.open_groups()
        assert world.state.next_depth == depth
        world.scored(world.open_groups()[-1], version=world.lineage.version_at_depth(depth))
        world.settle()
        world.version()
        world.settle()
    assert world.drops() == [(slow, "stale")]
    assert world.state.dropped == {"stale": 2}
    assert world.state.waiting_groups(world.view.depth) == 1 + staleness


def test_the_oldest_token_of_a_sample_counts() -> None:
    world = started(max_staleness=1, groups_per_batch=1)
    world.scored(0)
    world.settle()
    v1 = world.version()
    world.settle()
    mixed = (VersionSpan(2, 3, 0, "start"), VersionSpan(3, 4, v1, "retract"))
    world.outcome(world.score(1, 0, v1))
    world.outcome(world.score(1, 1, spans=mixed))
    world.settle()
    rows = world.batches()[-1].rows
    assert world.batches()[-1].for_depth == 1
    assert [row.least_depth for row in rows] == [1, 0]


def test_batches_run_ahead_of_the_trainer_only_as_far_as_the_bound() -> None:
    world = started(max_staleness=2, groups_per_batch=1, steps=50)
    for _ in range(3):
        world.scored(*world.open_groups())
        world.settle()
    assert [batch.for_depth for batch in world.batches()] == [0, 1, 2]
    assert world.open_groups() == []


@pytest.mark.parametrize("keep", [False, True])
def test_tokens_off_the_line_are_dropped_or_count_from_the_common_ancestor(keep: bool) -> None:
    world = started(max_staleness=2, groups_per_batch=1, keep_off_line=keep, steps=50)
    world.scored(0)
    world.settle()
    v1 = world.version()
    world.scored(1, version=v1)
    world.settle()
    v2 = world.version()
    world.settle()
    group = world.open_groups()[0]
    world.outcome(world.score(group, 0, v2))
    world.open(base=v1)
    world.settle()
    world.outcome(world.score(group, 1, v2)) if keep else None
    world.settle()
    if keep:
        row = next(row for batch in world.batches() for row in batch.rows if row.group == group)
        assert row.least_depth == 1
    else:
        assert (group, "off_line") in world.drops()


def test_tokens_of_a_quarantined_version_are_off_the_line() -> None:
    world = started(max_staleness=3, groups_per_batch=1, steps=50)
    world.scored(0)
    world.settle()
    v1 = world.version()
    world.settle()
    world.outcome(world.score(1, 0, v1))
    world.quarantine(v1)
    world.settle()
    assert (1, "off_line") in world.drops()


def test_a_version_that_the_log_has_not_is_never_trained_on() -> None:
    world = started()
    world.outcome(world.score(0, 0, 77))
    world.settle()
    assert (0, "unknown_version") in world.drops()


def test_the_last_depth_is_never_exceeded() -> None:
    world = started(steps=2, groups_per_batch=1, max_staleness=4)
    for _ in range(5):
        world.scored(*world.open_groups())
        world.settle()
    assert [batch.for_depth for batch in world.batches()] == [0, 1]
