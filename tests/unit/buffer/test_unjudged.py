"""A verifier that judges nothing ends the run by name, and one that fails now and then doesn't."""

from __future__ import annotations

from towline.buffer.decide import decide
from towline.contract.control import VERIFY_FAILED_ALL, EndRecord
from unit.buffer.world import World, only, started


def fail(world: World, *groups: int) -> None:
    for group in groups:
        world.failed(group, 0, "verify", final=True)


def fail_until_rest(world: World) -> int:
    """Every group that comes can't be judged; how many came."""
    failed = 0
    for _ in range(100):
        groups = world.open_groups()
        if not groups:
            return failed
        fail(world, *groups)
        failed += len(groups)
        world.settle()
    raise AssertionError("it goes on and on")


def test_a_verifier_that_fails_on_every_group_ends_the_run_by_name() -> None:
    world = started(max_failed_groups=7)
    assert 7 <= fail_until_rest(world) <= 8
    (end,) = only(world.records(), EndRecord)
    assert (end.reason, end.depth) == (VERIFY_FAILED_ALL, 0)
    assert world.view.finished
    world.restart()
    assert world.view.finished
    assert decide(world.view) == []


def test_a_crash_between_any_two_of_its_records_ends_it_the_same_way() -> None:
    world = started(max_failed_groups=4, max_staleness=2)
    fail(world, *world.open_groups()[:4])
    steps = 0
    while world.step():
        world.restart()
        steps += 1
    assert steps > 1
    assert [record.reason for record in only(world.records(), EndRecord)] == [VERIFY_FAILED_ALL]
    reasons = [reason for _, reason in world.drops()]
    assert reasons.count("verify_failed") == 4
    assert set(reasons) == {"verify_failed", VERIFY_FAILED_ALL}


def test_a_batch_starts_the_count_anew() -> None:
    world = started(max_failed_groups=5)
    for _ in range(4):
        fail(world, *world.open_groups())
        world.settle()
        world.scored(*world.open_groups())
        world.settle()
        world.version()
        world.settle()
    assert only(world.records(), EndRecord) == []
    assert len(world.drops()) == 8


def test_groups_that_wait_for_a_batch_keep_a_run_going_that_fails_often() -> None:
    world = started(max_failed_groups=4)
    world.scored(world.open_groups()[0])  # one of the two that a batch needs
    for _ in range(4):
        fail(world, world.open_groups()[-1])
        world.settle()
    assert only(world.records(), EndRecord) == []
    for _ in range(5):
        fail(world, world.open_groups()[-1])
        world.settle()
    assert [record.reason for record in only(world.records(), EndRecord)] == [VERIFY_FAILED_ALL]


def test_without_a_limit_it_goes_on() -> None:
    world = started(max_failed_groups=0)
    for _ in range(30):
        fail(world, *world.open_groups())
        world.settle()
    assert len(world.open_groups()) == 2
