"""Which version a replica goes to: forward past no open evaluation, back after a fork, never to one that failed."""

from __future__ import annotations

import pytest

from towline.contract.entries import LogEntry
from towline.errors import InvariantError
from towline.replica.states import WAYS, StateMachine
from towline.replica.target import EvalHolds, Subscription, choose
from towline.store.lineage import Lineage
from unit.store.entries import base, opened, quarantine, version


def lineage(*entries: LogEntry) -> Lineage:
    found = Lineage()
    for entry in entries:
        found.extend(entry)
    return found


LINE = (base(), opened(1, 0, 0), version(2, 1, 0, 1), version(3, 1, 2, 2), version(4, 1, 3, 3))
FORK = (*LINE, opened(5, 2, 1))


def never(_: int) -> bool:
    return False


def test_the_latest_is_served_where_no_evaluation_is_open() -> None:
    assert choose(lineage(*LINE), None, is_open=never, refused=()) == 4
    assert choose(lineage(*LINE), 2, is_open=never, refused=()) == 4
    assert choose(lineage(*LINE), 4, is_open=never, refused=()) == 4
    assert choose(Lineage(), None, is_open=never, refused=()) is None


def test_an_open_evaluation_keeps_its_version_and_is_not_skipped_on_the_way() -> None:
    line = lineage(*LINE)
    assert choose(line, 2, is_open=lambda v: v == 2, refused=()) == 2
    assert choose(line, 2, is_open=lambda v: v == 3, refused=()) == 3
    assert choose(line, None, is_open=lambda v: v in {0, 3}, refused=()) == 0
    assert choose(line, 3, is_open=lambda v: v == 2, refused=()) == 4, "never back to an earlier one"


def test_a_fork_takes_the_replica_back_to_the_line_even_from_an_open_evaluation() -> None:
    forked = lineage(*FORK)
    assert choose(forked, 4, is_open=never, refused=()) == 2
    assert choose(forked, 4, is_open=lambda v: v == 4, refused=()) == 2
    assert choose(lineage(*FORK, version(6, 5, 2, 2)), 4, is_open=never, refused=()) == 6
    assert choose(lineage(*FORK, version(6, 5, 2, 2)), 4, is_open=lambda v: v == 2, refused=()) == 2


def test_refused_and_quarantined_versions_are_passed_over() -> None:
    line = lineage(*LINE)
    assert choose(line, 2, is_open=lambda v: v == 4, refused={4}) == 3
    assert choose(line, 3, is_open=never, refused={4}) == 3
    assert choose(lineage(*LINE, quarantine(5, 3)), 4, is_open=never, refused=()) == 2


def holds(*, closed: set[int], issued: set[int], every: int = 2) -> EvalHolds:
    return EvalHolds(every=every, steps=100, hold_seconds=30.0, closed=closed.__contains__, issued=issued.__contains__)


def test_a_version_that_comes_while_following_is_held_for_its_tasks_and_no_longer_than_the_hold() -> None:
    line, issued = lineage(*LINE), set[int]()
    found = holds(closed=set(), issued=issued)
    assert not found.open(line, 3, 0.0), "an old one whose tasks are gone"
    found.know(3, 100.0)
    found.know(4, 100.0)
    assert found.open(line, 3, 100.0), "depth 2 is evaluated"
    assert not found.open(line, 4, 100.0), "depth 3 isn't"
    assert not found.open(line, 3, 130.0), "the buffer never issued anything"
    issued.add(3)
    assert found.open(line, 3, 1e9), "its tasks wait for somebody to serve it"
    found.serve(3, 200.0)
    assert found.open(line, 3, 229.9)
    assert not found.open(line, 3, 230.0)


def test_a_closed_evaluation_holds_nothing() -> None:
    line, closed = lineage(*LINE), set[int]()
    found = holds(closed=closed, issued={3})
    found.know(3, 0.0)
    found.serve(3, 0.0)
    assert found.open(line, 3, 1.0)
    closed.add(3)
    assert not found.open(line, 3, 1.0)
    assert found.until(line, 3) == -float("inf")


def test_no_evaluations_hold_nothing() -> None:
    found = holds(closed=set(), issued={3}, every=0)
    found.know(3, 0.0)
    assert not found.open(lineage(*LINE), 3, 0.0)


def test_a_state_is_reached_by_its_ways_alone() -> None:
    states = StateMachine()
    with pytest.raises(InvariantError, match="from starting to serving"):
        states.go("serving")
    for state in ("following", "preparing", "prepared", "activating", "failed", "serving", "draining"):
        states.go(state)  # type: ignore[arg-type]
    assert not WAYS["draining"]
    assert all(way in WAYS for ways in WAYS.values() for way in ways)


def test_a_pinned_replica_serves_its_version_on_the_line_or_not_and_no_other() -> None:
    pinned = Subscription(pinned=3)
    for serving in (None, 2, 3, 4):
        assert choose(lineage(*LINE), serving, is_open=never, refused=(), subscription=pinned) == 3
    assert choose(lineage(*FORK), 3, is_open=never, refused=(), subscription=pinned) == 3, "off the line"
    assert choose(lineage(*LINE[:3]), None, is_open=never, refused=(), subscription=pinned) is None, "not there yet"
    assert choose(lineage(*LINE), None, is_open=never, refused={3}, subscription=pinned) is None
    assert choose(lineage(*LINE, quarantine(5, 2)), 3, is_open=never, refused=(), subscription=pinned) is None


def test_one_that_may_be_behind_stays_until_too_much_is_above_it_and_then_goes_to_the_latest() -> None:
    line = lineage(*LINE)

    def chosen(serving: int | None, behind: int) -> int | None:
        return choose(line, serving, is_open=never, refused=(), subscription=Subscription(behind=behind))

    assert chosen(3, 1) == 3
    assert chosen(2, 1) == 4
    assert chosen(2, 2) == 2
    assert chosen(0, 2) == 4
    assert chosen(None, 2) == 4
    assert choose(lineage(*FORK), 4, is_open=never, refused=(), subscription=Subscription(behind=5)) == 2, "a fork counts at once"


def test_requests_of_an_exact_version_hold_it_until_their_time_or_their_end() -> None:
    line = lineage(*LINE)
    found = holds(closed={2, 3, 4}, issued=set(), every=0)
    found.keep(2, 100.0)
    assert found.until(line, 2) == 100.0
    assert choose(line, 2, is_open=lambda v: found.open(line, v, 99.0), refused=()) == 2
    assert choose(line, 2, is_open=lambda v: found.open(line, v, 100.0), refused=()) == 4
    assert choose(lineage(*FORK), 4, is_open=lambda v: found.open(line, v, 99.0), refused=()) == 2, "no hold off the line"
    found.keep(2, None)
    assert not found.open(line, 2, 99.0)
