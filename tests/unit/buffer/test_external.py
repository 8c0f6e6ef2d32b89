"""Groups from outside: admitted whole where pacing has room, else turned away, once and for good."""

from __future__ import annotations

import dataclasses
from itertools import permutations

import msgspec
import pytest

from towline.buffer.decide import decide
from towline.buffer.dump import Dump, decode_state, dump, encode_state, load
from towline.buffer.external import UNPACED
from towline.buffer.figures import figures
from towline.buffer.floors import floors
from towline.buffer.replay import UNKNOWN_TASK, apply_outcome
from towline.contract.codec import encode
from towline.contract.control import AdmitRecord, BatchRecord, DropRecord, SnapshotRecord, TaskRecord, decode_control
from towline.contract.groups import EXTERNAL
from towline.contract.outcome import decode_outcome
from towline.contract.task import VersionSpan
from towline.errors import InvariantError
from unit.buffer.world import World, kinds, only, started


def left_to_external(**changes: object) -> World:
    """Batches of two groups, one of which is left to external ones."""
    return started(**{"groups_per_batch": 2, "external_groups": 1, "max_staleness": 1, "steps": 20} | changes)


def admitted(world: World) -> list[tuple[int, int, int]]:
    return [(record.group, record.sample, record.group_size) for record in only(world.records(), AdmitRecord)]


def turned_away(world: World) -> list[tuple[int, str, object, int]]:
    return [(r.group, r.reason, r.offered, r.samples) for r in only(world.records(), DropRecord) if r.lane == EXTERNAL]


def test_a_group_is_admitted_once_all_of_it_is_scored_and_batched_like_another() -> None:
    world = left_to_external()
    assert len(world.open_groups()) == 2, "prompts leave room for one external group a batch"
    world.offer(-7, 1, size=3)
    world.offer(-7, 0, size=3)
    assert world.settle() == []
    assert figures(world.state, world.lineage, 20)["offered_groups"] == 1
    world.offer(-7, 2, size=3)
    assert kinds(world.settle()) == ["admit"] * 3
    assert admitted(world) == [(-7, 0, 3), (-7, 1, 3), (-7, 2, 3)]
    assert world.state.admitted == 2 * 2 + 3
    world.scored(0)
    record = only(world.settle(), BatchRecord)[0]
    assert [(row.group, row.sample) for row in record.rows] == [(-7, 0), (-7, 1), (-7, 2), (0, 0), (0, 1)]
    assert dump(world.rebuilt()) == dump(world.state)


def test_however_the_scores_are_ordered_the_state_is_one() -> None:
    seen = set()
    for order in permutations(range(3)):
        world = left_to_external()
        for sample in order:
            world.offer(-7, sample, size=3)
            world.settle()
        seen.add(tuple(admitted(world)))
        assert dump(world.rebuilt()) == dump(world.state)
    assert len(seen) == 1


def test_what_there_is_no_room_for_waits_the_oldest_first_and_before_new_prompts() -> None:
    world = started(groups_per_batch=1, max_staleness=1, steps=20)
    world.offer(-5)
    world.offer(-6)
    assert world.settle() == [], "prompts have taken the room"
    world.scored(0)
    world.settle()
    world.version()
    assert "admit" in kinds(world.settle())
    assert {group for group, _, _ in admitted(world)} == {-5}
    assert len(only(world.records(), TaskRecord)) == 2 * 2, "no prompt was drawn instead"


def test_more_than_a_bounds_worth_of_waiting_is_turned_away_as_unpaced() -> None:
    world = started(groups_per_batch=1, max_staleness=1, steps=20)
    for number in (-1, -2, -3, -4):
        world.offer(number)
    world.settle()
    assert turned_away(world) == [(-3, UNPACED, 2, 0), (-4, UNPACED, 2, 0)]
    shown = figures(world.state, world.lineage, 20)
    assert (shown["unpaced"], shown["turned_away"], shown["admitted"], shown["dropped"]) == (4, {UNPACED: 4}, 4, {})


def test_half_offers_are_bounded_by_max_open_groups() -> None:
    world = started(groups_per_batch=1, max_staleness=1, steps=20, max_open_groups=3)
    for number in range(-1, -6, -1):
        world.offer(number, 0)
    world.settle()
    assert turned_away(world) == [(-4, UNPACED, 1, 0), (-5, UNPACED, 1, 0)]


def test_an_offer_that_gets_too_stale_is_turned_away_whole_as_unpaced_and_in_part_as_stale() -> None:
    world = started(groups_per_batch=1, max_staleness=0, steps=20)
    world.offer(-1)
    world.offer(-2, 0)
    world.scored(0)
    world.settle()
    assert turned_away(world) == [(-1, UNPACED, 2, 0), (-2, "stale", 1, 0)]
    world.offer(-2, 1)
    assert world.state.late == 1
    world.restart()
    assert world.settle() == []
    assert dump(load(dump(world.state))) == dump(world.state)


def test_a_run_may_refuse_them_all() -> None:
    world = left_to_external(admit_external=False)
    world.offer(-1, 0)
    world.settle()
    world.offer(-1, 1)
    world.offer(-2)
    world.settle()
    assert turned_away(world) == [(-1, UNPACED, 1, 0), (-2, UNPACED, 2, 0)]
    assert admitted(world) == []


def test_a_final_failure_takes_the_offer_with_it_before_or_after_other_scores() -> None:
    for first in (True, False):
        world = left_to_external()
        if not first:
            world.offer(-1, 0)
        world.failed(-1, 1, "verify", final=True, lane=EXTERNAL, task_sequence=0)
        if first:
            world.offer(-1, 0)
        world.settle()
        assert turned_away(world) == [(-1, "verify_failed", 1, 0)]
        world.offer(-1, 1)
        assert world.settle() == []
        assert dump(world.rebuilt()) == dump(world.state)


def test_a_reward_that_isnt_finite_and_a_version_that_nobody_committed_are_refused() -> None:
    world = left_to_external()
    world.offer(-1, reward=float("nan"))
    world.offer(-2, version=99)
    world.settle()
    assert turned_away(world) == [(-1, "verify_failed", 2, 0), (-2, "unknown_version", 2, 0)]


def test_forged_and_repeated_outcomes_change_nothing() -> None:
    world = left_to_external()
    world.offer(-1, 0, size=2)
    world.offer(-1, 0, size=2)  # twice
    world.offer(-1, 1, size=3)  # another size than the first one said
    world.offer(-1, 5, size=2)  # no such sample
    world.offer(-2, 0, size=0)
    world.offer(-2, 0, size=1001)
    world.outcome(world.score(-1, 1, lane="train", task_sequence=0))  # a lane that isn't its own
    world.failed(-1, 1, "generate", lane=EXTERNAL, task_sequence=0)  # not final
    world.outcome(world.score(5, 0, lane=EXTERNAL, task_sequence=0))  # a number of the buffer's own
    world.outcome(world.score(-1, 1, lane=EXTERNAL, task_sequence=1))  # for a task
    assert world.state.late == 9
    assert world.settle() == []
    world.offer(-1, 1, size=2)
    assert kinds(world.settle()) == ["admit", "admit"]
    world.offer(-1, 0)
    world.failed(-1, 0, "verify", final=True, lane=EXTERNAL, task_sequence=0)
    assert world.settle() == []
    assert dump(world.rebuilt()) == dump(world.state)


def test_a_batch_voided_by_a_fork_gives_them_back_and_a_final_one_forgets_all_but_the_number() -> None:
    world = left_to_external(groups_per_batch=1, external_groups=1, max_staleness=1)
    assert only(world.records(), TaskRecord) == [], "everything is left to external groups"
    world.offer(-1)
    world.settle()
    v1 = world.version()
    world.offer(-2)
    assert "batch" in kinds(world.settle())
    world.restart()
    world.open(base=0)
    records = world.settle()
    assert [record.rows[0].group for record in only(records, BatchRecord)] == [-1]
    assert world.drops()[-1] == (-2, "off_line")
    assert v1 not in world.lineage.path()
    world.version()
    world.append(SnapshotRecord(writer="", blob=b"b" * 16, covers=0, outcome_cursor=0, floor_depth=1))
    assert -1 not in world.state.groups
    world.offer(-1)
    assert world.settle() == [], "it can't count a second time"
    assert dump(world.rebuilt()) == dump(world.state)


def test_a_snapshot_in_the_middle_of_an_offer_and_of_its_admission_is_the_whole_stream() -> None:
    world = left_to_external()
    world.offer(-1, 0)
    half = dump(world.state)
    cursor, control = world.applied_outcomes, len(world.control)
    frozen = encode(half)
    world.offer(-1, 1)
    world.settle()
    restored = load(msgspec.msgpack.decode(frozen, type=Dump))
    for sequence, data in enumerate(world.control[control:], start=control + 1):
        restored.apply(decode_control(data), sequence)
    for sequence, data in enumerate(world.outcomes[cursor:], start=cursor + 1):
        restored.apply_outcome(decode_outcome(data), sequence)
    assert dump(restored) == dump(world.state)


def test_trajectories_of_offers_stay_above_the_floor() -> None:
    world = left_to_external()
    world.offer(-1, 0)
    sequence = len(world.outcomes)
    found = floors(world.state, covers=10**6, outcome_cursor=0, reward_floor=10**6)
    assert found.trajectory == sequence
    assert found.control == 2, "an offer names nothing in CONTROL; the open groups' tasks begin there"


def test_at_the_end_offers_are_turned_away_by_name() -> None:
    world = left_to_external(steps=1, max_staleness=0)
    world.offer(-1)
    world.settle()
    world.scored(0)
    world.settle()
    world.version()
    world.offer(-2, 0)
    world.settle()
    assert turned_away(world) == [(-2, "end_of_run", 1, 0)]
    assert world.view.finished


def test_a_record_that_contradicts_what_stands_is_refused() -> None:
    world = left_to_external()
    world.offer(-1)
    world.settle()
    for record in (
        AdmitRecord(writer="", lane=EXTERNAL, group=-1, sample=0, group_size=2),
        AdmitRecord(writer="", lane=EXTERNAL, group=-1, sample=2, group_size=2),
        AdmitRecord(writer="", lane=EXTERNAL, group=7, sample=0, group_size=1),
    ):
        with pytest.raises(InvariantError):
            world.append(record)
    world.append(DropRecord(writer="", lane=EXTERNAL, group=-9, samples=0, reason=UNPACED, offered=1))
    with pytest.raises(InvariantError):
        world.append(DropRecord(writer="", lane=EXTERNAL, group=-9, samples=0, reason=UNPACED, offered=1))
    with pytest.raises(InvariantError):
        world.append(AdmitRecord(writer="", lane=EXTERNAL, group=-9, sample=0, group_size=1))


def test_a_whole_groups_admission_is_one_unit() -> None:
    world = left_to_external()
    world.offer(-1, size=5)
    assert [len(unit) for unit in decide(world.view)] == [5]
    world.rules = dataclasses.replace(world.rules, max_open_groups=2)
    assert decide(world.view) == []


def test_a_size_that_nobody_can_mean_takes_no_memory_even_after_a_failure() -> None:
    world = left_to_external()
    world.failed(-1, 0, "malformed", final=True, lane="", task_sequence=0)
    world.outcome(world.score(-1, 0, lane=EXTERNAL, group_size=1 << 60, task_sequence=0))
    assert world.state.late == 1
    world.settle()
    assert turned_away(world) == [(-1, "malformed", 0, 0)]
    assert dump(world.rebuilt()) == dump(world.state)


def test_scores_without_tokens_are_refused_and_dont_stop_the_buffer() -> None:
    world = left_to_external()
    for spans in ((), (VersionSpan(4, 4, 0, "start"),)):
        number = -1 - len(spans)
        world.offer(number, spans=spans)
        own = world.open_groups()[0]
        world.outcome(world.score(own, 0, spans=spans))
        world.settle()
        assert (number, "malformed", 2, 0) in turned_away(world)
        assert (own, "malformed") in world.drops()
    assert dump(world.rebuilt()) == dump(world.state)


def test_a_task_sequence_from_outside_cant_look_like_a_lost_control() -> None:
    """Of the buffer's own groups, a score for a task that CONTROL hasn't means that CONTROL lost its tail."""
    world = left_to_external()
    forged = world.score(-1, 0, lane=EXTERNAL, task_sequence=10**9)
    assert apply_outcome(world.state, encode(forged), 1) is None
    assert world.state.late == 1
    assert apply_outcome(world.state, encode(world.score(0, 0, task_sequence=10**9)), 2) == UNKNOWN_TASK


def test_a_snapshot_of_a_release_without_external_groups_is_read() -> None:
    world = left_to_external()
    world.scored(0)
    tree = msgspec.msgpack.decode(encode_state(world.state))
    for new in ("offers", "refused", "closed_external", "turned_away", "requeued"):
        del tree[new]
    old = decode_state(msgspec.msgpack.encode(tree))
    assert dump(old) == dump(world.state)
