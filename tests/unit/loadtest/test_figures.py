"""Metrics of a run that was written by hand, so that every figure is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.loadtest.collect import Life, Lives, Trained
from towline.loadtest.figures import fill
from towline.loadtest.result import Result, new_result
from towline.loadtest.scenario import load_scenario
from towline.loadtest.watch import Looks

START = 1000.0


def life(at: float, *, tokens: int = 10, trained: bool = True) -> Life:
    """Pulled 0.1 s after its task, generated for 2 s, durable 0.01 s later, scored 0.02 s later, batched 1 s after that."""
    done = at + 2.1
    return Life(
        task_at=at, attempt=0, pulled_at=at + 0.1, finished_at=done, queue_seconds=0.0, generate_seconds=2.0,
        durable_at=done + 0.01, tokens=tokens, version_start=0, replica="w0", nbytes=100, scored_at=done + 0.03,
        batched_at=done + 1.03 if trained else None, for_depth=0 if trained else None,
    )  # fmt: skip


def written(tmp_path: Path) -> Result:
    """A sample a second for 100 s, every tenth (ten times as long) dropped as stale; batches each 10 s, 4 of them idle."""
    path = tmp_path / "s.toml"
    path.write_text("[load]\nwarm_up_seconds = 10\n")
    found = Lives(began_at=START)
    for second in range(100):
        long = second % 10 == 9
        found.lives[second] = life(START + second, tokens=100 if long else 10, trained=not long)
        found.admitted.append(START + second)
    found.drops["stale"] = 10
    found.batches = [Trained(number, START + 10 * number, [0, 1, 2], [5.0], 90, 9) for number in range(10)]
    looks = Looks(rows=[
        {"at": START + 2 * step, "trainer.idle_seconds": 0.8 * step, "trainer.train_seconds": 1.2 * step, "rss.buffer": 100e6,
         "rss.reward": 100e6 * (1 + step / 50), "workers.busy": 3.0, "workers.slots": 4.0}
        for step in range(51)
    ])  # fmt: skip
    result = new_result(load_scenario(path))
    fill(result, found, looks, max_staleness=2)
    return result


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
