"""What a simulation says, under the names that a load test's metrics have, and the hops' times that a load test found."""

from __future__ import annotations

import time

import numpy as np

from towline.loadtest.result import Result, new_result
from towline.loadtest.scenario import Model, Scenario
from towline.simulate.pipeline import Pipeline, Seen

BATCH_SECONDS = 0.015
"""From a batch's record to the beginning of its step, where the trainer is free: 32 rows on two cores, by the trainer's log (10
to 17 ms). A load test's result doesn't tell it."""


def simulate(scenario: Scenario, *, seed: int | None = None, until: float | None = None) -> Result:
    """The scenario's run, simulated; the window is cut as a load test's is. `seed`: in place of `run.seed`."""
    began = time.perf_counter()
    seed = scenario.settings.run.seed if seed is None else seed
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
    staleness = [value for *_, number in batches for value in seen.staleness[number * rows : (number + 1) * rows]]
    result.distribution("staleness", staleness)
    ages = [value for *_, number in batches for value in seen.age_seconds[number * rows : (number + 1) * rows]]
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


def calibrated(measured: Result, assumed: Model) -> Model:
    """The hops' times as a load test on this machine found them, the rest as it was assumed: what a simulation of another fleet
    begins from. Best of a load test whose slots are free and whose trainer is busy."""
    metrics = measured.metrics

    def of(*names: str) -> float:
        return sum(metrics.get(f"{name}.mean", 0.0) for name in names)

    publish = metrics.get("trainer.publish_seconds", 0.0)
    # A version's time to a worker counts from its entry; in a simulation, from the buffer's knowing of it.
    known = max(publish - of("weights.encode_seconds", "weights.upload_seconds", "weights.verify_seconds"), 0.0)
    found = {
        "task_seconds": _task_seconds(measured),
        "score_seconds": of("hop.finished_to_durable", "hop.durable_to_scored"),
        "publish_seconds": publish,
        "snapshot_seconds": metrics.get("trainer.snapshot_seconds", 0.0),
        "prepare_seconds": max(of("weights.publish_to_serving_seconds") - known, 0.0),
        "wire_bytes": int(of("weights.wire_bytes")),
    }
    if "batch_seconds" not in assumed.model_fields_set:
        found["batch_seconds"] = BATCH_SECONDS
    return assumed.model_copy(update=found)


def _task_seconds(measured: Result) -> float:
    """From a task that stands to a worker with a free slot: seconds. Both of these are that or more: the median task's time to
    a worker, which may have waited for a slot, and a slot's time between two samples, in which it may have waited for a task."""
    metrics = measured.metrics
    found = [metrics.get("hop.task_to_pulled.p50", 0.0)]
    if rate := metrics.get("samples_per_second"):
        slots = measured.load["workers"] * measured.settings["rollout"]["slots"]
        taken = metrics.get("hop.generate.mean", 0.0) + metrics.get("hop.finished_to_durable.mean", 0.0)
        found.append(max(slots / rate - taken, 0.0))
    return min(found)
