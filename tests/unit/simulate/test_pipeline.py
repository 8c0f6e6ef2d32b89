"""The simulator against closed forms: with constant times the whole pipeline has one."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from towline.loadtest.result import Result
from towline.loadtest.scenario import Scenario, load_scenario
from towline.simulate.outcome import simulate
from towline.simulate.pipeline import Pipeline, Seen

ZERO = {
    "task_seconds": 0.0, "score_seconds": 0.0, "batch_seconds": 0.0, "publish_seconds": 0.0, "prepare_seconds": 0.0,
}  # fmt: skip
GROUP, PER_BATCH = 2, 3


def scenario(tmp_path: Path, **overrides: Any) -> Scenario:
    """Samples of exactly 100 tokens at 100 tokens/s (1 s), steps of 1 s, nothing else takes time."""
    path = tmp_path / "s.toml"
    path.write_text("")
    plain: dict[str, Any] = {
        "run.steps": 40, "buffer.group_size": GROUP, "buffer.groups_per_batch": PER_BATCH, "buffer.max_staleness": 1,
        "rollout.arguments": {"mean_tokens": 100, "sigma": 0.0, "tokens_per_second": 100}, "load.workers": 6,
        "load.warm_up_seconds": 5, "simulate": {},
    }  # fmt: skip
    plain |= {f"simulate.{name}": value for name, value in ZERO.items()}
    return load_scenario(path, plain | overrides)


def seconds_per_step(seen: Seen, skip: int = 6) -> float:
    times = [at for at, _ in seen.commits]
    return (times[-skip] - times[skip]) / (len(times) - 2 * skip)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize(
    ("workers", "tokens", "step"),
    [(64, 1000, 1.0), (64, 100, 10.0), (64, 400, 4.0), (6, 400, 4.0), (3, 200, 1.0)],
    ids=["slow samples", "slow trainer", "even", "few slots", "very few slots"],
)
def test_constant_times_give_the_throughput_of_a_closed_network(
    tmp_path: Path, staleness: int, workers: int, tokens: int, step: float
) -> None:
    """min(1 / T, slots / (D n), (1 + s) / (wave + T)): the asymptotic bounds of Denning and Buzen, which these cases reach."""
    one = scenario(
        tmp_path,
        **{
            "buffer.max_staleness": staleness, "load.workers": workers, "load.trainer.step_seconds": step,
            "sampling.max_tokens": 2000, "rollout.arguments": {"mean_tokens": tokens, "sigma": 0.0, "tokens_per_second": 100},
        },
    )  # fmt: skip
    seen = Pipeline(one).run()
    sample, samples = tokens / 100, GROUP * PER_BATCH
    wave = math.ceil(samples / workers) * sample
    bound = min(1 / step, workers / (sample * samples), (1 + staleness) / (wave + step))
    assert 1 / seconds_per_step(seen) == pytest.approx(bound, rel=0.1)
    assert max(seen.staleness) <= staleness
    assert seen.dropped_stale == 0
    assert seen.most_open <= (1 + staleness) * PER_BATCH
    assert seen.commits[-1][1] == 40


def test_synchronous_mode_is_generation_training_and_publishing_one_after_the_other(tmp_path: Path) -> None:
    one = scenario(tmp_path, **{"buffer.max_staleness": 0, "simulate.publish_seconds": 0.5, "simulate.prepare_seconds": 0.25})
    result = simulate(one)
    assert result.metrics["batches_per_second"] == pytest.approx(1 / (1 + 1 + 0.5 + 0.25), rel=0.02)
    assert result.metrics["trainer_idle_share"] == pytest.approx(1.75 / 2.75, rel=0.05)
    assert result.metrics["staleness.max"] == 0


def test_a_row_is_as_stale_as_its_own_oldest_tokens_not_its_groups(tmp_path: Path) -> None:
    """One slot, samples of 1 s, batches of one group of two: a batch's first sample begins when the batch before it is formed, a
    quarter of a second too early for its version, which the second sample has. So rows are 1 and 0, and the mean is a half."""
    one = scenario(
        tmp_path,
        **{"buffer.groups_per_batch": 1, "load.workers": 1, "load.trainer.step_seconds": 0.25, "load.warm_up_seconds": 0},
    )  # fmt: skip
    seen = Pipeline(one).run()
    assert seen.staleness == [0, 0, *[1, 0] * 39]
    # The second sample began 1 s before its batch, 0.75 s after its version; the first one's version is a batch (2 s) older.
    assert seen.age_seconds[2:4] == pytest.approx([4.0, 1.75])
    assert seen.age_seconds[4:] == pytest.approx([3.75, 1.75] * 38)


def test_a_version_is_taken_between_two_steps_alone(tmp_path: Path) -> None:
    """Steps of 1 s without a pause and 2.5 s a version: it's committed in the third step, and the next is taken after that: three
    steps are in each."""
    one = scenario(tmp_path, **{"simulate.publish_seconds": 2.5, "load.workers": 64, "buffer.max_staleness": 12})
    commits = Pipeline(one).run().commits
    assert [depth for _, depth in commits[:5]] == [1, 4, 7, 10, 13]
    assert [later - sooner for (sooner, _), (later, _) in pairwise(commits[:5])] == pytest.approx([3.0] * 4)


def test_a_trainer_that_waits_takes_the_version_that_is_due(tmp_path: Path) -> None:
    """Two batches at once, then none until their versions stand: steps of 1 s, 1.5 s a version. The first is committed at 3.5 s,
    and the second, a step later, is then taken without waiting for a batch."""
    one = scenario(tmp_path, **{"simulate.publish_seconds": 1.5, "load.workers": 12})
    commits = Pipeline(one).run().commits
    assert [depth for _, depth in commits[:2]] == [1, 2]
    assert [at for at, _ in commits[:2]] == pytest.approx([3.5, 5.0])


def test_a_snapshot_isnt_idle_time(tmp_path: Path) -> None:
    one = scenario(tmp_path, **{"buffer.max_staleness": 0, "simulate.snapshot_seconds": 0.5, "simulate.publish_seconds": 0.5})
    result = simulate(one)
    assert result.metrics["batches_per_second"] == pytest.approx(1 / 3, rel=0.02)
    assert result.metrics["trainer_idle_share"] == pytest.approx(1.5 / 3, abs=0.01)


def test_a_reward_service_at_its_limit_sets_the_pace(tmp_path: Path) -> None:
    one = scenario(tmp_path, **{"simulate.scores_per_second": 2.0, "load.workers": 64, "buffer.max_staleness": 4})
    assert simulate(one).metrics["trained_samples_per_second"] == pytest.approx(2.0, rel=0.02)


def test_a_version_reaches_the_fleet_when_the_stores_bandwidth_lets_it(tmp_path: Path) -> None:
    """1,000 hosts that fetch 1 MB each from a store of 100 MB/s: the last has it after 10 s, and one far away no sooner."""
    one = scenario(
        tmp_path,
        **{
            "load.workers": 1000, "run.steps": 3, "simulate.wire_bytes": 1_000_000, "simulate.store_bytes_per_second": 1e8,
            "load.trainer.step_seconds": 60.0,
        },
    )  # fmt: skip
    seen = Pipeline(one).run(until=140.0)
    assert seen.spread_all[0] == pytest.approx(10.0, rel=0.01)
    assert sorted(seen.spread[:1000])[499] == pytest.approx(5.0, rel=0.02)


def test_a_far_site_pays_its_round_trips_and_its_link(tmp_path: Path) -> None:
    links = [{"share": 0.5}, {"share": 0.5, "round_trip_seconds": 0.2, "bytes_per_second": 1e6}]
    one = scenario(tmp_path, **{"simulate.links": links, "simulate.wire_bytes": 2_000_000, "load.trainer.step_seconds": 30.0})
    seen = Pipeline(one).run(until=40.0)
    assert sorted(seen.spread)[:3] == [0.0] * 3
    assert sorted(seen.spread)[3:6] == pytest.approx([0.6 + 2.0] * 3)


def test_a_host_prepares_one_version_at_a_time_and_goes_on_with_the_newest(tmp_path: Path) -> None:
    """A version each second, 2.3 s a preparation: each is followed by that of the newest there is, two versions on."""
    one = scenario(
        tmp_path, **{"simulate.prepare_seconds": 2.3, "load.workers": 64, "buffer.max_staleness": 12, "run.steps": 12}
    )  # fmt: skip
    seen = Pipeline(one).run()
    # Versions are there at 2, 3, 4 s, …; preparations end at 4.3, 6.6, 8.9 and 11.2 s.
    assert [at for at, _ in seen.commits[:3]] == pytest.approx([2.0, 3.0, 4.0])
    assert seen.spread[::64] == pytest.approx([4.3 - 2, 6.6 - 4, 8.9 - 6, 11.2 - 8])
    assert seen.spread_all == pytest.approx(seen.spread[::64])


def test_whatever_fails_no_step_is_lost_and_the_bound_holds(tmp_path: Path) -> None:
    one = scenario(
        tmp_path,
        **{
            "simulate.worker_mtbf_seconds": 30.0, "simulate.start_seconds": 3.0, "rollout.ack_wait_seconds": 5,
            "rollout.arguments": {"mean_tokens": 100, "sigma": 1.0, "tokens_per_second": 100, "failure_rate": 0.05},
            "simulate.trainer_mtbf_seconds": 40.0, "simulate.trainer_start_seconds": 5.0, "run.steps": 60,
        },
    )  # fmt: skip
    seen = Pipeline(one, seed=3).run()
    assert seen.commits[-1][1] == 60
    assert seen.made_again > 0
    assert max(seen.staleness) <= 1
    assert len(seen.staleness) == 60 * GROUP * PER_BATCH


def test_a_slot_that_dies_half_of_the_time_does_half_of_the_work(tmp_path: Path) -> None:
    """Availability MTBF / (MTBF + repair), of samples that are short against both."""
    plain = {
        "load.workers": 4, "buffer.max_staleness": 8, "load.trainer.step_seconds": 0.01, "run.steps": 300,
        "rollout.arguments": {"mean_tokens": 10, "sigma": 0.0, "tokens_per_second": 100}, "rollout.ack_wait_seconds": 1,
    }  # fmt: skip
    whole = simulate(scenario(tmp_path, **plain)).metrics["trained_samples_per_second"]
    half = simulate(scenario(tmp_path, **plain, **{"simulate.worker_mtbf_seconds": 5.0, "simulate.start_seconds": 5.0}))
    assert half.metrics["trained_samples_per_second"] / whole == pytest.approx(0.5, rel=0.15)


def test_the_same_seed_is_the_same_run_and_another_isnt(tmp_path: Path) -> None:
    one = scenario(tmp_path, **{"rollout.arguments": {"mean_tokens": 100, "sigma": 1.0, "tokens_per_second": 100}})
    first, again, other = (Pipeline(one, seed=seed).run().commits for seed in (1, 1, 2))
    assert first == again != other


def test_a_result_is_a_load_tests_in_kind(tmp_path: Path) -> None:
    result = simulate(scenario(tmp_path))
    assert isinstance(result, Result)
    assert result.kind == "simulation"
    assert {"staleness.mean", "goodput_tokens_per_second", "policy_age_seconds.p50"} <= set(result.metrics)
