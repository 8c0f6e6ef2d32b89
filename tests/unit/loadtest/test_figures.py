"""Metrics of a run that was written by hand, so that every figure is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.written_lives import written


def test_hops_are_the_differences_of_the_streams_own_times(tmp_path: Path) -> None:
    metrics = written(tmp_path).metrics
    expected = {
        "task_to_pulled": 0.1,
        "generate": 2.0,
        "finished_to_durable": 0.01,
        "durable_to_scored": 0.02,
        "scored_to_batched": 1.0,
    }
    for name, seconds in expected.items():
        for quantile in ("p50", "p99", "p99.9"):
            assert metrics[f"hop.{name}.{quantile}"] == pytest.approx(seconds, abs=1e-6)


def test_rates_are_those_of_the_window_between_warm_up_and_last_admission(tmp_path: Path) -> None:
    metrics = written(tmp_path).metrics
    assert metrics["measured_seconds"] == pytest.approx(89.0)
    assert metrics["offered_samples_per_second"] == pytest.approx(1.0, rel=0.02)
    assert metrics["samples_per_second"] == pytest.approx(1.0, rel=0.02)
    assert metrics["goodput_tokens_per_second"] == pytest.approx(9.0)
    assert metrics["trained_samples_per_second"] == pytest.approx(0.9)


def test_staleness_bias_and_idleness(tmp_path: Path) -> None:
    metrics = written(tmp_path).metrics
    assert metrics["staleness.mean"] == pytest.approx(1.0)
    assert metrics["over_bound_rows"] == 0
    assert metrics["dropped_stale_share"] == pytest.approx(0.1)
    assert metrics["length_bias"] == pytest.approx(10 / 19)
    assert metrics["trainer_idle_share"] == pytest.approx(0.4)
    assert metrics["slots_busy_share"] == pytest.approx(0.75)


def test_a_process_that_grows_is_seen_and_one_that_doesnt_isnt(tmp_path: Path) -> None:
    metrics = written(tmp_path).metrics
    assert metrics["rss.buffer_growth_share"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["memory_growth_share"] == metrics["rss.reward_growth_share"] > 0.3
