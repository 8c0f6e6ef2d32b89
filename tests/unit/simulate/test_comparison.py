"""How sure a comparison is, against what is known of normal draws and against load tests that are simulations themselves."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binom, t

from towline.errors import UsageError
from towline.loadtest.result import new_result
from towline.loadtest.scenario import Scenario, load_scenario
from towline.simulate.comparison import CHECKED, LEVEL, Check, against, compare, student
from towline.simulate.outcome import BATCH_SECONDS, calibrated, simulate

TRIALS = 500


def scenario(tmp_path: Path, **overrides: Any) -> Scenario:
    """The fleet keeps the trainer waiting; a run of 25 batches."""
    path = tmp_path / "s.toml"
    path.write_text("")
    plain: dict[str, Any] = {
        "run.steps": 25, "buffer.group_size": 4, "buffer.groups_per_batch": 4, "buffer.max_staleness": 1, "load.workers": 8,
        "rollout.arguments": {"mean_tokens": 100, "sigma": 0.5, "tokens_per_second": 100}, "load.warm_up_seconds": 3,
    }  # fmt: skip
    return load_scenario(path, plain | {"load.trainer.step_seconds": 0.3} | overrides)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 15, 60])
def test_students_t_is_scipys_within_a_hundredth(freedom: int) -> None:
    assert student(freedom) == pytest.approx(t.ppf((1 + LEVEL) / 2, freedom), rel=0.01)


def covered(trial: int, count: int) -> bool:
    """Whether the margin of so many pairs, 5% apart with noise of 10%, holds the 5%; of one pair by 15 simulations' spread."""
    chance = random.Random(trial)
    draws = [(chance.gauss(9.5, 0.7), chance.gauss(10.0, 0.7)) for _ in range(count)]
    simulated, measured = ([{"batches_per_second": pair[side]} for pair in draws] for side in (0, 1))
    others = [{"batches_per_second": chance.gauss(9.5, 0.7)} for _ in range(15)]
    (one,) = compare(simulated, measured, others)
    signed = (one.simulated - one.measured) / one.measured
    assert one.off == pytest.approx(abs(signed))
    return abs(signed + 0.5 / one.measured) <= one.margin


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_the_margin_holds_the_true_difference_as_often_as_it_says(count: int) -> None:
    found = sum(covered(trial, count) for trial in range(TRIALS))
    assert binom.ppf(1e-4, TRIALS, LEVEL) <= found <= binom.ppf(1 - 1e-4, TRIALS, LEVEL)


def test_a_difference_is_relative_but_for_shares() -> None:
    metrics = ({"batches_per_second": 0.9, "trainer_idle_share": 0.3}, {"batches_per_second": 1.0, "trainer_idle_share": 0.25})
    found = {one.metric: one.off for one in compare([metrics[0]] * 2, [metrics[1]] * 2)}
    assert found == {"batches_per_second": pytest.approx(0.1), "trainer_idle_share": pytest.approx(0.05)}


def test_a_verdict_is_sure_only_where_the_whole_interval_is_on_one_side() -> None:
    one = Check("staleness.mean", 0.9, 1.0, off=0.1, margin=0.03)
    assert [one.verdict(bound) for bound in (0.06, 0.08, 0.12, 0.14)] == ["off", "unsure", "unsure", "within"]


def test_one_load_test_alone_needs_simulations_of_other_seeds() -> None:
    one = [{"batches_per_second": 1.0}]
    with pytest.raises(ValueError, match="needs 5"):
        compare(one, one, one * 4)


def test_the_idle_share_of_one_load_test_has_the_grain_of_what_a_trainer_tells() -> None:
    same = {"trainer_idle_share": 0.5, "measured_seconds": 20.0}
    (one,) = compare([same], [same], [same] * 5)
    assert one.margin == pytest.approx(0.1)


def test_a_load_test_that_is_the_model_is_no_noise_off(tmp_path: Path) -> None:
    """Same seeds, same lengths: nothing is left between the two."""
    one = scenario(tmp_path)
    measured = [simulate(one, seed=seed) for seed in (1, 2, 3)]
    checks, simulated = against(one, measured)
    assert [check.metric for check in checks] == list(CHECKED)
    assert all(check.off == check.margin == 0.0 for check in checks)
    assert [result.seed for result in simulated] == [1, 2, 3]


def test_versions_that_come_later_than_the_model_says_are_noticed(tmp_path: Path) -> None:
    """With versions a second late rows are staler: too much for noise, by three load tests; one alone tells less."""
    slow = scenario(tmp_path, **{"simulate.publish_seconds": 1.2})
    checks, _ = against(scenario(tmp_path), [simulate(slow, seed=seed) for seed in (1, 2, 3)])
    assert "off" in [check.verdict(0.1) for check in checks if check.metric == "staleness.mean"]
    alone, _ = against(scenario(tmp_path), [simulate(slow, seed=1)])
    for one, three in zip(alone, checks, strict=True):
        assert one.margin > three.margin


def test_noise_of_one_short_load_test_is_told_as_such(tmp_path: Path) -> None:
    """Five batches of long-tailed lengths say little: other draws of the same model would be called off without their margin."""
    one = scenario(tmp_path, **{
        "run.steps": 8, "rollout.arguments": {"mean_tokens": 100, "sigma": 1.2, "tokens_per_second": 100}})  # fmt: skip
    measured = [replace(simulate(one, seed=seed), seed=100 + seed) for seed in range(8)]
    found = [check for result in measured for check in against(one, [result])[0]]
    assert sum(check.off > 0.1 for check in found) > len(found) / 10
    assert sum(check.verdict(0.1) == "off" for check in found) <= len(found) / 20


def test_a_result_that_isnt_a_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a transport result"):
        against(scenario(tmp_path), [new_result(scenario(tmp_path), "transport")])


def test_hops_are_taken_from_a_result_and_the_rest_from_the_scenario(tmp_path: Path) -> None:
    one = scenario(tmp_path, **{"simulate.worker_mtbf_seconds": 900.0, "load.workers": 10, "rollout.slots": 2})
    result = new_result(one, "run")
    result.metrics = {
        "trainer.publish_seconds": 0.06, "weights.encode_seconds.mean": 0.005, "weights.upload_seconds.mean": 0.006,
        "weights.verify_seconds.mean": 0.009, "weights.publish_to_serving_seconds.mean": 0.1, "hop.task_to_pulled.p50": 1.5,
        "hop.generate.mean": 0.97, "hop.finished_to_durable.mean": 0.01, "hop.durable_to_scored.mean": 0.02,
        "samples_per_second": 20.0,
    }  # fmt: skip
    model = calibrated(result, one.simulate)
    assert model.worker_mtbf_seconds == 900.0
    # An entry is known 0.04 s after it was written: that is in the publishing already.
    assert [model.publish_seconds, model.prepare_seconds] == pytest.approx([0.06, 0.06])
    # 20 slots at 20 samples/s: 1 s each, of which 0.98 s are the sample's. The median task waited for a slot.
    assert model.task_seconds == pytest.approx(0.02)
    assert model.score_seconds == pytest.approx(0.03)
    assert model.batch_seconds == BATCH_SECONDS
    result.metrics["hop.task_to_pulled.p50"] = 0.005  # free slots
    assert calibrated(result, one.simulate).task_seconds == 0.005
    assumed = scenario(tmp_path, **{"simulate.batch_seconds": 0.5}).simulate
    assert calibrated(result, assumed).batch_seconds == 0.5
