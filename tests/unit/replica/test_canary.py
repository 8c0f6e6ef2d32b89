"""Canaries: a stable share goes first, the others follow what every canary has proved for long enough."""

from __future__ import annotations

from towline.replica.canary import NONE_YET, CanaryWatch, canaries
from towline.replica.target import Subscription, choose
from towline.store.lineage import Lineage
from unit.replica.test_target import FORK, LINE, lineage, never
from unit.store.entries import quarantine

NAMES = [f"worker-{index}" for index in range(20)]


def test_a_share_of_the_names_rounded_up_and_at_least_one_is_canary() -> None:
    assert len(canaries(NAMES, 0.1)) == 2
    assert len(canaries(NAMES, 0.11)) == 3
    assert len(canaries(["a", "b"], 0.01)) == 1
    assert canaries(NAMES, 1.0) == set(NAMES)
    assert canaries([], 0.5) == set()


def test_who_comes_or_goes_moves_at_most_one_other_across() -> None:
    before = canaries(NAMES, 0.2)
    for gone in NAMES:
        after = canaries([name for name in NAMES if name != gone], 0.2)
        assert len(after ^ (before - {gone})) <= 1
    assert len(canaries([*NAMES, "another"], 0.2) - before - {"another"}) <= 1


def watch(names: list[str]) -> tuple[CanaryWatch, str, str]:
    """With two canaries of `names`."""
    one, two = sorted(canaries(names, 0.2))
    return CanaryWatch(share=0.2, seconds=60.0), one, two


def test_the_others_wait_until_each_canary_has_proved_a_version_for_the_time() -> None:
    line = lineage(*LINE)
    found, one, two = watch(NAMES[:10])
    found.see(line, NAMES[:10], {one: 0, two: 0}, 0.0)
    found.see(line, NAMES[:10], {one: 3, two: 0}, 10.0)
    assert found.cleared(line, 59.9) == NONE_YET
    assert found.cleared(line, 60.0) == 0
    found.see(line, NAMES[:10], {one: 4, two: 3}, 100.0)
    assert found.cleared(line, 159.9) == 0
    found.see(line, NAMES[:10], {one: 4, two: 4}, 130.0)
    assert found.cleared(line, 160.0) == 3, "what stands on a version proves it too"
    assert found.cleared(line, 189.9) == 3
    assert found.cleared(line, 190.0) == 4


def test_a_version_that_one_canary_never_proved_is_never_cleared() -> None:
    line = lineage(*LINE)
    found, one, two = watch(NAMES[:10])
    for second in range(0, 1000, 10):
        found.see(line, NAMES[:10], {one: 4, two: 2}, float(second))
    assert found.cleared(line, 1e6) == 2
    found.see(line, NAMES[:10], {one: 4}, 1e6)
    assert found.cleared(line, 2e6) == 2, "nobody has heard of the second canary"


def test_a_quarantined_version_is_not_cleared_any_more() -> None:
    line = lineage(*LINE)
    found, one, two = watch(NAMES[:10])
    found.see(line, NAMES[:10], {one: 3, two: 3}, 0.0)
    assert found.cleared(line, 60.0) == 3
    assert found.cleared(lineage(*LINE, quarantine(5, 3)), 61.0) == NONE_YET


def test_a_follower_that_joins_begins_where_the_others_are() -> None:
    line = lineage(*LINE)
    found, one, two = watch(NAMES[:10])
    others = {name: 2 for name in NAMES[:10]}  # noqa: C420
    found.see(line, NAMES[:10], others | {one: 4, two: 4, "worker-99": 4}, 0.0)
    assert found.cleared(line, 0.0) == 2


def test_a_look_that_misses_an_entry_makes_nobody_else_a_canary() -> None:
    line = lineage(*LINE)
    found, one, two = watch(NAMES[:10])
    for second in (0.0, 2.0, 4.0, 6.0):
        found.see(line, NAMES[:10], {}, second)
    assert {name for name in NAMES if found.is_canary(name, 6.0)} == {one, two}
    found.see(line, [name for name in NAMES[:10] if name != one], {}, 7.0)
    assert {name for name in NAMES if found.is_canary(name, 7.0)} == {one, two}
    for second in (10.0, 13.0):
        found.see(line, [name for name in NAMES[:10] if name != one], {}, second)
    assert {name for name in NAMES if found.is_canary(name, 13.0)} == {two}, "another one takes over, once it is sure"
    found.see(line, [name for name in NAMES[:10] if name != one], {}, 18.0)
    assert len({name for name in NAMES if found.is_canary(name, 18.0)} - {two}) == 1


def test_a_fleet_that_starts_together_agrees_on_its_canaries_before_one_goes_first() -> None:
    line = lineage(*LINE)
    found, one, _ = watch(NAMES[:10])
    other = next(name for name in NAMES[:10] if name not in canaries(NAMES[:10], 0.2))
    found.see(line, [other], {}, 0.0)
    found.see(line, NAMES[:10], {}, 1.0)
    assert not found.is_canary(other, 1e3)
    assert not found.is_canary(one, 5.9)
    assert found.is_canary(one, 6.0)


def chosen(line: Lineage, serving: int | None, cleared: int) -> int | None:
    return choose(line, serving, is_open=never, refused=(), subscription=Subscription(cleared=cleared))


def test_a_follower_goes_no_further_than_what_is_cleared_and_never_back_for_it() -> None:
    line = lineage(*LINE)
    assert chosen(line, 2, 3) == 3
    assert chosen(line, 3, 2) == 3
    assert chosen(line, None, 3) == 3
    assert chosen(line, None, NONE_YET) == 0, "it serves something rather than wait"
    assert chosen(line, 2, NONE_YET) == 2


def test_a_follower_leaves_a_line_that_was_given_up_whatever_the_canaries_say() -> None:
    forked = lineage(*FORK)
    assert chosen(forked, 4, NONE_YET) == 2
    assert chosen(forked, 4, 4) == 2
