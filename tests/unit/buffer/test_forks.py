"""A trainer goes on from an older version: what is void, what is open again, what is issued anew."""

from __future__ import annotations

import pytest

from towline.contract.control import ForkRecord, ReissueRecord
from towline.errors import InvariantError
from unit.buffer.world import World, kinds, only, started


def advanced(*, staleness: int = 1, depths: int = 3) -> World:
    """One group a batch; `depths` versions are committed."""
    world = started(max_staleness=staleness, groups_per_batch=1, keep_off_line=True, steps=50)
    for _ in range(depths):
        world.scored(world.open_groups()[0])
        world.settle()
        world.version()
        world.settle()
    return world


def test_the_fork_record_comes_before_anything_else_of_the_new_epoch() -> None:
    world = advanced()
    world.scored(*world.open_groups())
    epoch = world.open(base=world.lineage.version_at_depth(1))
    records = world.settle()
    assert isinstance(records[0], ForkRecord)
    assert (records[0].epoch, records[0].base, records[0].depth) == (epoch, world.lineage.version_at_depth(1), 1)
    assert world.state.epoch == epoch


def test_batches_at_or_above_the_fork_are_void_and_their_rows_are_batched_again() -> None:
    world = advanced(staleness=2)
    old = {batch.for_depth: batch for batch in world.batches()}
    epoch = world.open(base=world.lineage.version_at_depth(1))
    world.settle()
    anew = [batch for batch in world.batches() if batch.epoch == epoch]
    assert [batch.for_depth for batch in anew[:2]] == [1, 2]
    rows = {row.group for batch in anew for row in batch.rows}
    assert {row.group for depth in (1, 2) for row in old[depth].rows} <= rows | {group for group, _ in world.drops()}
    assert old[0].rows[0].group not in rows
    assert len({(batch.epoch, batch.for_depth) for batch in world.batches()}) == len(world.batches())


def test_a_trainer_that_goes_on_from_the_head_voids_only_what_it_had_not_committed() -> None:
    world = advanced(staleness=2)
    world.scored(*world.open_groups())
    world.settle()
    ahead = [batch for batch in world.batches() if batch.for_depth >= 3]
    assert ahead
    epoch = world.open()
    world.settle()
    assert [batch.for_depth for batch in world.batches() if batch.epoch == epoch] == [batch.for_depth for batch in ahead]
    again = {row for batch in world.batches() if batch.epoch == epoch for row in batch.rows}
    assert again == {row for batch in ahead for row in batch.rows}


def test_a_drop_stays_final_across_a_fork() -> None:
    world = advanced()
    gone = world.open_groups()[0]
    world.failed(gone, 0, "verify", final=True)
    world.settle()
    world.open(base=0)
    world.settle()
    assert gone not in world.state.groups
    assert [group for group, _ in world.drops()].count(gone) == 1


def test_unfinished_tasks_that_wait_for_a_lost_depth_are_cancelled_and_issued_again() -> None:
    world = advanced(staleness=1, depths=4)
    waiting = {
        (number, index): sample.not_before_depth
        for number in world.open_groups()
        for index, sample in enumerate(world.state.groups[number].samples)
        if sample is not None and sample.not_before_depth > 1
    }
    assert waiting
    done = next(iter(waiting))
    world.outcome(world.score(*done))
    del waiting[done]
    world.open(base=world.lineage.version_at_depth(1))
    records = world.settle()
    again = only(records, ReissueRecord)
    assert {(record.task.group, record.task.sample) for record in again} == set(waiting)
    assert {(record.task.not_before_depth, record.reason) for record in again} == {(1, "fork")}
    assert kinds(records)[0] == "fork"
    assert world.settle() == []


def test_a_crash_before_the_fork_record_is_harmless() -> None:
    straight, crashed = advanced(), advanced()
    for world in (straight, crashed):
        world.open(base=world.lineage.version_at_depth(2))
    crashed.restart()
    straight.settle()
    crashed.settle()
    assert straight.control == crashed.control


def test_only_the_newest_of_several_epochs_counts() -> None:
    world = advanced()
    world.open()
    newest = world.open(base=world.lineage.version_at_depth(2))
    forks = only(world.settle(), ForkRecord)
    assert [(fork.epoch, fork.depth) for fork in forks] == [(newest, 2)]


def test_a_log_that_has_consumed_more_than_control_holds_stops_the_run() -> None:
    world = advanced()
    del world.control[-20:]
    world.restart()
    with pytest.raises(InvariantError, match="CONTROL lost its tail") as found:
        world.settle()
    assert found.value.code == "stream_regressed"
