"""Which trajectories may still be scored, though reward has acknowledged them."""

from __future__ import annotations

from towline.buffer.groups import Group
from towline.buffer.unscored import may_be_scored
from towline.contract.groups import EXTERNAL
from unit.buffer.test_floors import release, trained
from unit.buffer.world import started


def subject(group: int | str, sample: int | str) -> str:
    return f"towline.r.trajectory.{group}.{sample}"


def test_a_sample_is_waited_for_while_its_group_is_open_and_it_has_no_score() -> None:
    world = started(steps=20, groups_per_batch=2, max_staleness=1)
    first, *_ = world.open_groups()
    assert may_be_scored(world.state, subject(first, 0))
    assert may_be_scored(world.state, subject(world.state.next_group, 0)), "admitted, and not known of yet"
    trained(world, 3)
    batched = world.state.batches[2].groups[0]
    assert not may_be_scored(world.state, subject(batched, 0)), "it has its score: the state names it"
    release(world, 2)
    assert first not in world.state.groups
    assert not may_be_scored(world.state, subject(first, 0))
    for strange in (subject("x", 0), subject(first, "x"), subject(world.open_groups()[0], 99), "towline.r.trajectory"):
        assert not may_be_scored(world.state, strange)


def test_an_external_group_nobody_knows_of_is_waited_for_as_long_as_patience_goes() -> None:
    state = started(steps=20).state
    assert may_be_scored(state, subject("ext-7", 0))
    assert not may_be_scored(state, subject("ext-7", 0), patient=False)
    state.offers[-7] = Group(-7, EXTERNAL, 2, float("inf"), None, None, [None, None])
    assert may_be_scored(state, subject("ext-7", 1), patient=False)
    del state.offers[-7]
    state.closed_external[-7] = None
    assert not may_be_scored(state, subject("ext-7", 0))
