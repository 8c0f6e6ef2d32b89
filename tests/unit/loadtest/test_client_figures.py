"""Clients' figures of calls that were written by hand, so that every one is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.loadtest.client_figures import Call, fairness, jain, kept_up, tell
from towline.loadtest.result import Result, new_result
from towline.loadtest.scenario import load_scenario


@pytest.fixture
def result(tmp_path: Path) -> Result:
    path = tmp_path / "s.toml"
    path.write_text("")
    return new_result(load_scenario(path))


def stream(meant: float, *, late: float = 0.0, tenant: str = "a") -> Call:
    """9 tokens: the first at 0.5 s after it was meant, then two pieces of 4, 0.4 s apart each."""
    return Call(tenant, "stream", meant, meant + late, meant + 0.5, meant + 1.3, 9, "ok", [3], [(0.4, 4), (0.4, 4)])


def test_ttft_itl_and_tpot_are_sglangs_and_guidellms(result: Result) -> None:
    tell(result, "x", [stream(100.0 + second, late=0.2) for second in range(10)], 100.0, 10.0)
    metrics = result.metrics
    assert metrics["x.ttft_seconds.p50"] == pytest.approx(0.5), "from the intended time, however late it was sent"
    assert metrics["x.itl_seconds.count"] == 80
    assert metrics["x.itl_seconds.p99"] == pytest.approx(0.1)
    assert metrics["x.tpot_seconds.mean"] == pytest.approx((1.3 - 0.5) / 8)
    assert metrics["x.tpot_whole_seconds.mean"] == pytest.approx(1.3 / 9)
    assert metrics["x.latency_seconds.mean"] == pytest.approx(1.3)
    assert metrics["x.late_seconds"] == pytest.approx(0.2)
    assert metrics["x.requests_per_second"] == pytest.approx(0.9), "the last one ended after the window"
    assert metrics["x.tokens_per_second"] == pytest.approx(8.1)
    assert metrics["x.versions"] == 1


def test_refusals_are_counted_apart_and_errors_by_kind(result: Result) -> None:
    outcomes = ["refused.429", "refused.429", "refused.503", "stream.cut", "status.409.WeightVersionNotReady"]
    tell(result, "x", [stream(0.0), *(Call("a", "whole", 0.0, 0.0, 0.0, 1.0, 0, outcome) for outcome in outcomes)], 0.0, 2.0)
    metrics = result.metrics
    assert (metrics["x.refused"], metrics["x.errors"], metrics["x.requests"]) == (3, 2, 6)
    assert metrics["x.errors.stream.cut"] == metrics["x.errors.status.409.WeightVersionNotReady"] == 1
    assert metrics["x.latency_seconds.count"] == 1, "a refusal's time isn't an answer's"


def test_a_system_that_falls_behind_shows_it_in_the_second_half() -> None:
    keeps_up = [stream(at / 10) for at in range(100)]
    assert kept_up(keeps_up, 0.0, 10.0) == pytest.approx(10.0)
    behind = [Call("a", "whole", at / 10, at / 10, 0.0, at / 5, 1) for at in range(100)]
    assert kept_up(behind, 0.0, 10.0) == pytest.approx(5.0)


def test_fairness_is_one_where_each_client_gets_the_same(result: Result) -> None:
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([6.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    calls = [stream(second, tenant=tenant) for second in range(8) for tenant in ("a", "a", "a", "b")]
    fairness(result, calls, {"a": 3, "b": 1}, 0.0, 8.0)
    assert result.metrics["tenants.fairness"] == pytest.approx(1.0)
    assert [row["share_of_clients"] for row in result.tables["tenants"]] == [0.75, 0.25]
    fairness(result, calls, {"a": 1, "b": 1}, 0.0, 8.0)
    assert result.metrics["tenants.fairness"] == pytest.approx((3 + 1) ** 2 / (2 * (3**2 + 1)))
