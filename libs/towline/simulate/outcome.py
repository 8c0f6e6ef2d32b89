"""What a simulation says, under the names that a load test's metrics have, and its check against one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from towline.loadtest.result import Result, new_result
from towline.loadtest.scenario import Model, Scenario
from towline.simulate.pipeline import Pipeline, Seen

CHECKED = (
    "trained_samples_per_second",
    "goodput_tokens_per_second",
    "batches_per_second",
    "staleness.mean",
    "trainer_idle_share",
)


@dataclass(frozen=True, slots=True)
class Check:
    """One metric, simulated and measured. `off` is relative, for shares absolute."""

    metric: str
    simulated: float
    measured: float
    off: float


def simulate(scenario: Scenario, *, seed: int = 0, until: float | None = None) -> Result:
    """The scenario's run, simulated; the window is cut as a load test's is."""
    began = time.perf_counter()
    pipeline = Pipeline(scenario, seed=seed)
    seen = pipeline.run(until)
    result = new_result(scenario, "simulation")
    result.seed = seed
    fill(result, seen, scenario, end=pipeline.env.now)
    result.metrics["simulated_seconds"] = pipeline.env.now
    result.metrics["wall_seconds"] = time.perf_counter() - began
    result.settings["simulate"] = scenario.simulate.model_dump(mode="json")
    return result


def fill(result: Result, seen: Seen, scenario: Scenario, end: float) -> None:
    metrics = result.metrics
    begin = (seen.batches[0][0] if seen.batches else 0.0) + scenario.load.warm_up_seconds
    end = min(seen.admitted[-1] if seen.admitted else end, end)
    if end - begin < 1.0:
        begin, end = 0.0, max(end, 1e-9)
    seconds = result.measured_seconds = metrics["measured_seconds"] = end - begin
    batches = [(at, rows, tokens, number) for number, (at, rows, tokens) in enumerate(seen.batches) if begin <= at < end]
    span = batches[-1][0] - batches[0][0] if len(batches) > 1 else 0.0
    for name, column in (("trained_samples_per_second", 1), ("goodput_tokens_per_second", 2)):
        metrics[name] = sum(batch[column] for batch in batches[1:]) / span if span else 0.0
    metrics["batches_per_second"] = (len(batches) - 1) / span if span else 0.0
    samples = [(at, tokens) for at, tokens in seen.samples if begin <= at < end]
    metrics["samples_per_second"] = len(samples) / seconds
    metrics["tokens_per_second"] = sum(tokens for _, tokens in samples) / seconds
    metrics["workers"] = float(scenario.load.workers)
    rows = scenario.settings.buffer.group_size * scenario.settings.buffer.groups_per_batch
    groups = scenario.settings.buffer.groups_per_batch
    staleness = [value for *_, number in batches for value in seen.staleness[number * rows : (number + 1) * rows]]
    result.distribution("staleness", staleness)
    ages = [value for *_, number in batches for value in seen.age_seconds[number * groups : (number + 1) * groups]]
    result.distribution("policy_age_seconds", ages)
    metrics["staleness_bound"] = float(scenario.settings.buffer.max_staleness)
    metrics["admitted_samples"] = float(len(seen.admitted))
    metrics["dropped_stale_share"] = seen.dropped_stale / max(len(seen.admitted), 1)
    trained = sum(seen.trained_lengths) / max(len(seen.trained_lengths) * scenario.settings.buffer.group_size, 1)
    scored = float(np.mean([tokens for _, tokens in seen.samples])) if seen.samples else 1.0
    metrics["length_bias"] = trained / scored if trained else 1.0
    worked = sum(min(stop, end) - max(start, begin) for start, stop in seen.steps if stop > begin and start < end)
    metrics["trainer_idle_share"] = max(1.0 - worked / seconds, 0.0)
    result.distribution("weights.publish_to_serving_seconds", seen.spread)
    result.distribution("weights.publish_to_all_seconds", seen.spread_all)
    metrics["errors.reissues"] = float(seen.made_again)
    metrics["depth_reached"] = float(seen.commits[-1][1] if seen.commits else 0)


def calibrated(measured: Result) -> Model:
    """The hops' times as a load test on this machine found them: what a simulation of another fleet begins from."""
    metrics = measured.metrics

    def of(*names: str) -> float:
        return sum(metrics.get(name, 0.0) for name in names)

    pulled = measured.distributions.get("hop.task_to_pulled", [0.0])
    return Model(
        task_seconds=pulled[len(pulled) // 10],  # of tasks that found a free slot: waiting for one is simulated
        score_seconds=of("hop.finished_to_durable.mean", "hop.durable_to_scored.mean"),
        publish_seconds=of("trainer.publish_seconds"),
        snapshot_seconds=of("trainer.snapshot_seconds"),
        prepare_seconds=of("weights.publish_to_serving_seconds.mean"),
        wire_bytes=int(of("weights.wire_bytes.mean")),
    )


def check(simulated: Mapping[str, float], measured: Mapping[str, float]) -> list[Check]:
    found = []
    for name in CHECKED:
        if name in simulated and name in measured:
            a, b = simulated[name], measured[name]
            off = abs(a - b) if name.endswith("_share") else abs(a - b) / abs(b) if b else abs(a)
            found.append(Check(name, a, b, off))
    return found
