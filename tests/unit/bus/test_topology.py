"""The names of a run, against the table in the design."""

from __future__ import annotations

import pytest

from towline.bus.topology import BUCKETS, STREAMS, Topology
from towline.errors import UsageError


def test_a_runs_names_are_the_designs() -> None:
    names = Topology("my-run")
    assert names.task("train") == "towline.my-run.control.task.train"
    assert names.task("eval", 7) == "towline.my-run.control.task.eval.7"
    assert names.reissue("train") == "towline.my-run.control.reissue.train"
    assert names.score(3, 1) == "towline.my-run.outcome.score.3.1"
    assert names.trajectory("ext-a", 0) == "towline.my-run.trajectory.ext-a.0"
    assert names.relative(names.policy("staged")) == "policy.staged"
    assert {spec.key for spec in STREAMS} == {"CONTROL", "TRAJECTORY", "OUTCOME", "PARTIAL", "POLICY", "DEAD"}


def test_the_budget_is_shared_out_and_not_overdrawn() -> None:
    assert 0.95 <= sum(spec.budget_share for spec in (*STREAMS, *BUCKETS)) <= 1.0


def test_two_runs_share_no_name() -> None:
    a, b = Topology("a"), Topology("a-b")
    assert not {a.stream(spec) for spec in STREAMS} & {b.stream(spec) for spec in STREAMS}
    assert not {a.bucket(spec) for spec in BUCKETS} & {b.bucket(spec) for spec in BUCKETS}
    assert not b.task("train").startswith(a.subject(""))


@pytest.mark.parametrize("name", ["", "A", "a.b", "a b", "a*", "x" * 33, "ä"])
def test_a_name_that_would_break_a_subject_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="use 1 to 32"):
        Topology(name)


def test_a_lanes_consumer_sees_its_tasks_and_reissues_and_an_exact_one_goes_away() -> None:
    names = Topology("r")
    lane = names.lane_consumer("train", 8)
    assert lane.filters == (names.task("train"), names.reissue("train"))
    assert (lane.max_ack_pending, lane.inactive_seconds) == (16, None)
    exact = names.lane_consumer("eval", 8, version=3)
    assert exact.durable != names.lane_consumer("eval", 8, version=4).durable
    assert "." not in exact.durable
    assert exact.inactive_seconds is not None
    with pytest.raises(UsageError, match="lane"):
        names.lane_consumer("a.b", 1)
