"""Groups that clients claim: a share of each batch, issued in a lane of their own, and otherwise groups like any other."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from towline.buffer.dump import dump
from towline.buffer.figures import waiting_for
from towline.buffer.records import subject_of
from towline.bus.topology import Topology
from towline.config import BufferSettings
from towline.contract.control import BatchRecord, ReissueRecord, TaskRecord
from towline.contract.task import SESSION, TRAIN
from unit.buffer.test_numbers import fleet_of
from unit.buffer.world import World, only, started


def shared(**changes: object) -> World:
    """Batches of four groups, one of which clients claim."""
    return started(**{"groups_per_batch": 4, "session_groups": 1, "max_staleness": 1, "steps": 20} | changes)


def lanes(world: World) -> Counter[str]:
    return Counter(world.state.groups[number].lane for number in world.open_groups())


def test_a_share_of_each_batch_is_issued_in_the_session_lane_under_its_own_environment() -> None:
    world = shared()
    assert lanes(world) == {TRAIN: 6, SESSION: 2}, "two batches' worth, a quarter of it to be claimed"
    topology = Topology("world")
    for record in only(world.records(), TaskRecord):
        claimed = record.task.lane == SESSION
        assert record.task.environment == ("agent" if claimed else "e:E")
        assert subject_of(record, topology).endswith("task.session" if claimed else "task.train")
    places = [world.state.groups[number].lane for number in world.open_groups()]
    assert places[:4].count(SESSION) == places[4:].count(SESSION) == 1, "evenly mixed, so that each batch has its own"


def test_claimed_groups_are_batched_as_others_and_their_room_comes_back() -> None:
    world = shared()
    claimed = [number for number in world.open_groups() if world.state.groups[number].lane == SESSION]
    world.scored(*world.open_groups()[:4])
    (batch,) = only(world.settle(), BatchRecord)
    assert claimed[0] in {row.group for row in batch.rows}
    assert lanes(world) == {TRAIN: 3, SESSION: 1}, "in a batch that waits for the trainer they still take their share"
    world.version()
    world.settle()
    assert lanes(world) == {TRAIN: 6, SESSION: 2}
    assert dump(world.rebuilt()) == dump(world.state)


def test_nobody_who_claims_leaves_the_workers_share_alone_and_a_drop_gives_the_room_back() -> None:
    world = shared()
    train = [number for number in world.open_groups() if world.state.groups[number].lane == TRAIN]
    world.scored(*train)
    world.settle()
    world.version()
    world.settle()
    assert lanes(world)[SESSION] == 2, "no more of them than their share, however long they wait"
    world.now += 1000.0
    world.settle()
    assert lanes(world)[SESSION] == 2
    assert {reason for _, reason in world.drops()} == {"deadline"}


def test_an_abandoned_sample_is_issued_again_in_its_lane_and_drops_its_group_after_the_last_attempt() -> None:
    world = shared(groups_per_batch=1, session_groups=1, max_staleness=0, max_attempts=2)
    assert lanes(world) == {SESSION: 1}, "everything is to be claimed"
    (number,) = world.open_groups()
    world.failed(number, 0, "abandoned", lane=SESSION)
    (again,) = only(world.settle(), ReissueRecord)
    assert (again.task.lane, again.task.attempt, again.reason) == (SESSION, 1, "abandoned")
    assert subject_of(again, Topology("world")).endswith("reissue.session")
    world.failed(number, 0, "abandoned", lane=SESSION)
    world.settle()
    assert (number, "attempts") in world.drops()


def test_a_run_that_waits_for_clients_alone_says_so() -> None:
    world = shared(max_staleness=0)

    def state() -> str:
        return waiting_for(world.view, fleet_of(("serving", 0)), batch_waits_seconds=0.0).partition(":")[0]

    train = [number for number in world.open_groups() if world.state.groups[number].lane == TRAIN]
    world.now += 16.0
    assert state() == "", "workers are at it, too"
    world.scored(*train)
    world.settle()
    assert state() == "claims_awaited"
    world.scored(*world.open_groups())
    world.settle()
    assert state() == ""


def test_without_a_share_nothing_is_issued_there() -> None:
    assert lanes(shared(session_groups=0)) == {TRAIN: 8}
    with pytest.raises(ValidationError):
        BufferSettings(session_groups=-1)
