"""What may be purged, and what a state forgets with it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from towline.buffer.dump import decode_state, dump, encode_state, load
from towline.buffer.floors import final_depth, floors
from towline.buffer.totals import Totals
from towline.contract.control import BatchRecord, SnapshotRecord, TaskRecord
from towline.errors import InvariantError
from unit.buffer.world import World, started

EVERYTHING = 10**6


def trained(world: World, batches: int) -> None:
    for _ in range(batches):
        world.scored(*world.open_groups())
        world.settle()
        world.version()
        world.settle()


def release(world: World, depth: int) -> None:
    world.append(SnapshotRecord(writer="", blob=b"b" * 16, covers=0, outcome_cursor=0, floor_depth=depth))


def test_the_two_newest_checkpoints_can_be_gone_back_to() -> None:
    assert final_depth([]) == 0
    assert final_depth([7]) == 7
    assert final_depth([30, 20, 10]) == 20


def test_nothing_that_is_open_in_the_protocols_sense_lies_below_the_floors() -> None:
    world = started(steps=10, groups_per_batch=2, max_staleness=1)
    trained(world, 4)
    release(world, 2)
    found = floors(world.state, covers=EVERYTHING, outcome_cursor=17, reward_floor=EVERYTHING)
    batches = {r.for_depth: (s, r) for s, r in enumerate(world.records(), 1) if isinstance(r, BatchRecord)}
    kept = {row.group for depth, (_, record) in batches.items() if depth >= 2 for row in record.rows} | set(world.open_groups())
    tasks = [s for s, r in enumerate(world.records(), 1) if isinstance(r, TaskRecord) and r.task.group in kept]
    assert found.control == min(batches[1][0], *tasks)
    assert found.trajectory == min(row.sequence for depth, (_, record) in batches.items() if depth >= 2 for row in record.rows)
    assert found.outcome == 18


def test_the_snapshot_and_rewards_ack_floor_bound_them_too() -> None:
    world = started(steps=10, groups_per_batch=2, max_staleness=1)
    trained(world, 4)
    release(world, 4)
    found = floors(world.state, covers=5, outcome_cursor=0, reward_floor=3)
    assert (found.control, found.outcome, found.trajectory) == (6, 1, 4)
    assert floors(world.state, covers=5, outcome_cursor=0, reward_floor=None).trajectory == 1


def test_without_a_checkpoint_everything_trained_stays() -> None:
    world = started(steps=10, groups_per_batch=2)
    trained(world, 3)
    release(world, final_depth([]))
    found = floors(world.state, covers=EVERYTHING, outcome_cursor=0, reward_floor=EVERYTHING)
    assert found.trajectory == 1
    assert found.control == next(s for s, r in enumerate(world.records(), 1) if isinstance(r, TaskRecord))


def test_a_state_forgets_the_groups_of_final_batches_and_keeps_the_figures() -> None:
    world = started(steps=20, groups_per_batch=2)
    trained(world, 8)
    before, totals = len(world.state.groups), world.state.counted()
    assert totals.samples == 8 * 4
    release(world, 6)
    assert before - len(world.state.groups) == 6 * 2
    assert world.state.totals == world.state.counted() == totals
    assert world.state.final.batches == 6
    assert list(world.state.batches) == [6, 7]
    assert dump(world.rebuilt()) == dump(world.state)
    assert dump(decode_state(encode_state(world.state))) == dump(world.state)
    trained(world, 1)
    assert dump(world.rebuilt()) == dump(world.state)


def test_batches_that_arent_formed_yet_are_never_final() -> None:
    world = started(steps=20, groups_per_batch=2)
    trained(world, 2)
    release(world, 9)
    assert world.state.floor_depth == 2
    trained(world, 1)
    assert world.view.depth == 3


def test_a_trainer_that_goes_below_the_floor_stops_the_run_by_name() -> None:
    world = started(steps=20, groups_per_batch=2)
    trained(world, 4)
    release(world, 3)
    world.open(base=world.lineage.version_at_depth(1))
    with pytest.raises(InvariantError) as found:
        world.settle()
    assert found.value.code == "below_floor"


def test_a_fork_above_the_floor_goes_on() -> None:
    world = started(steps=20, groups_per_batch=2, max_staleness=1, keep_off_line=True)
    trained(world, 4)
    release(world, 2)
    world.open(base=world.lineage.version_at_depth(2))
    world.settle()
    assert world.state.batches.keys() >= {2}
    assert world.state.batches[2].epoch == world.state.epoch
    assert dump(world.rebuilt()) == dump(world.state)


def test_a_snapshot_of_a_release_that_kept_final_batches_one_by_one_says_the_same() -> None:
    world = started(steps=20, groups_per_batch=2)
    trained(world, 8)
    older = tuple(replace(batch, groups=()) if depth < 6 else batch for depth, batch in sorted(world.state.batches.items()))
    release(world, 6)
    facts = dump(world.state)
    assert dump(load(replace(facts, batches=older, final=Totals(), final_sequence=0))) == facts


def test_what_a_state_holds_does_not_grow_with_the_run() -> None:
    """The groups' deadlines never come here, and nothing of a group may stay until they do."""
    world = started(steps=300, groups_per_batch=2)
    sizes = []
    for depth in range(10, 300, 10):
        trained(world, 10)
        release(world, depth)
        sizes.append(len(encode_state(world.state)))
    assert max(sizes[5:]) < 1.05 * min(sizes[5:])
    assert world.state.admitted > 1000
    assert len(world.state.deadlines) < 300
    assert len(world.state.batches) <= 10
    assert len(world.state.by_version) < 30
    assert set(world.state.overdue(now=1e12)) == set(world.open_groups())
