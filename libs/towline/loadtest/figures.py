"""A run's lives as metrics: hops, tokens, policy age, weights, the trainer's share of idleness.

The measured window begins `warm_up_seconds` after the first batch and ends with the last admission: before, the pipeline fills;
afterwards it drains, and neither says anything about a rate.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from towline.loadtest.collect import Life, Lives
from towline.loadtest.result import Result
from towline.loadtest.watch import Looks

HOPS = ("task_to_pulled", "generate", "finished_to_durable", "durable_to_scored", "scored_to_batched", "task_to_batched")
"""In the order in which a sample takes them."""
BIN_SECONDS = 2.0


def window_of(found: Lives, warm_up_seconds: float) -> tuple[float, float]:
    """(begin, end), Unix seconds. Where the run is shorter than its warm-up, or nothing came of it: all of it."""
    begins = (found.batches[0].at if found.batches else found.began_at) + warm_up_seconds
    ends = max(found.admitted, default=found.began_at)
    if ends - begins < 1.0 or (found.lives and not any(begins <= life.durable_at < ends for life in found.lives.values())):
        return found.began_at, max(
            [ends, *(batch.at for batch in found.batches), *(life.durable_at for life in found.lives.values())]
        )
    return begins, ends


def fill(result: Result, found: Lives, looks: Looks, max_staleness: int) -> None:
    """Everything that a run's lives say, into the result."""
    begin, end = window_of(found, result.warm_up_seconds)
    seconds = result.measured_seconds = max(end - begin, 1e-9)
    lives = [life for life in found.lives.values() if begin <= life.durable_at < end]
    _hops(result, lives)
    _rates(result, found, lives, begin, end)
    _policy(result, found, begin, end, max_staleness)
    _trainer(result, looks, begin, end)
    _weights(result, found, begin)
    _errors(result, found, looks)
    if not result.settings["buffer"].get("keep_history", True):
        _without_history(result, looks, begin, end)
    _memory(result, looks, begin)
    for name, values in looks.timings.items():
        result.distribution(f"{name}_seconds", values)
    result.metrics["measured_seconds"] = seconds
    result.series["looks"] = looks.columns(found.began_at)
    result.series["flow"] = _flow(found)


def _hops(result: Result, lives: list[Life]) -> None:
    spans: dict[str, list[float]] = {name: [] for name in HOPS}
    for life in lives:
        if life.task_at is not None:
            spans["task_to_pulled"].append(max(life.pulled_at - life.task_at, 0.0))
        spans["generate"].append(life.finished_at - life.pulled_at)
        spans["finished_to_durable"].append(max(life.durable_at - life.finished_at, 0.0))
        if life.scored_at is not None:
            spans["durable_to_scored"].append(life.scored_at - life.durable_at)
            if life.batched_at is not None:
                spans["scored_to_batched"].append(max(life.batched_at - life.scored_at, 0.0))
        if life.task_at is not None and life.batched_at is not None:
            spans["task_to_batched"].append(life.batched_at - life.task_at)
    for name, values in spans.items():
        result.distribution(f"hop.{name}", values)
    result.distribution("sample.bytes", [life.nbytes for life in lives])
    result.distribution("sample.tokens", [life.tokens for life in lives])
    result.distribution("engine.queue_seconds", [life.queue_seconds for life in lives])


def _rates(result: Result, found: Lives, lives: list[Life], begin: float, end: float) -> None:
    seconds, metrics = end - begin, result.metrics
    trained = [batch for batch in found.batches if begin <= batch.at < end]
    metrics["offered_samples_per_second"] = sum(begin <= at < end for at in found.admitted) / seconds
    metrics["samples_per_second"] = len(lives) / seconds
    metrics["tokens_per_second"] = sum(life.tokens for life in lives) / seconds
    metrics["bytes_per_second"] = sum(life.nbytes for life in lives) / seconds
    metrics["trained_samples_per_second"] = _steady(trained_at := [b.at for b in trained], [b.rows for b in trained])
    metrics["goodput_tokens_per_second"] = _steady(trained_at, [b.tokens for b in trained])
    metrics["batches_per_second"] = _steady(trained_at, [1] * len(trained))
    metrics["workers"] = float(len({life.replica for life in found.lives.values()}))


def _steady(at: list[float], amounts: Iterable[float]) -> float:
    """A rate between the first and the last event, the first one's amount left out: not the share of a bin that is cut off."""
    amounts = list(amounts)
    return sum(amounts[1:]) / (at[-1] - at[0]) if len(at) > 1 and at[-1] > at[0] else 0.0


def _policy(result: Result, found: Lives, begin: float, end: float, bound: int) -> None:
    trained = [batch for batch in found.batches if begin <= batch.at < end]
    metrics = result.metrics
    staleness = [value for batch in trained for value in batch.staleness]
    result.distribution("staleness", staleness)
    result.distribution("policy_age_seconds", [value for batch in trained for value in batch.age_seconds])
    metrics["staleness_bound"] = float(bound)
    metrics["over_bound_rows"] = float(sum(value > bound for value in staleness))
    admitted = len(found.admitted)
    metrics["admitted_samples"] = float(admitted)
    metrics["dropped_stale_share"] = found.drops["stale"] / admitted if admitted else 0.0
    unfinished = found.drops["end_of_run"]
    metrics["dropped_share"] = (found.drops.total() - unfinished) / max(admitted - unfinished, 1)
    scored = [life.tokens for life in found.lives.values() if life.scored_at is not None]
    used = [life.tokens for life in found.lives.values() if life.for_depth is not None]
    metrics["length_bias"] = float(np.mean(used) / np.mean(scored)) if used and scored else 1.0
    counts = np.bincount(staleness) if staleness else np.zeros(1, np.int64)
    result.series["staleness"] = {"depths": list(map(float, range(counts.size))), "rows": counts.astype(float).tolist()}


def _trainer(result: Result, looks: Looks, begin: float, end: float) -> None:
    rows = [row for row in looks.rows if begin <= row["at"] < end and "trainer.idle_seconds" in row]
    idle = spent = 0.0
    for before, after in pairwise(rows):
        waited = after["trainer.idle_seconds"] - before["trainer.idle_seconds"]
        worked = after["trainer.train_seconds"] - before["trainer.train_seconds"]
        if waited >= 0 and worked >= 0:  # else it was started again in between
            idle, spent = idle + waited, spent + after["at"] - before["at"]
    result.metrics["trainer_idle_share"] = idle / spent if spent else 0.0
    last = rows[-1] if rows else {}
    if versions := last.get("trainer.versions"):
        for name, figure in (("publish", "commit_seconds"), ("snapshot", "snapshot_seconds")):
            result.metrics[f"trainer.{name}_seconds"] = last[f"trainer.{figure}"] / versions
    slots = [row["workers.busy"] / row["workers.slots"] for row in rows if row.get("workers.slots")]
    result.metrics["slots_busy_share"] = float(np.mean(slots)) if slots else 0.0


def _weights(result: Result, found: Lives, begin: float) -> None:
    versions = [entry for entry in found.versions if entry.at >= begin] or found.versions
    for phase in ("encode", "upload", "verify"):
        result.distribution(f"weights.{phase}_seconds", [getattr(entry, f"{phase}_seconds") for entry in versions])
    result.distribution("weights.wire_bytes", [entry.wire_bytes for entry in versions])
    result.metrics["weights.versions_per_second"] = _steady([entry.at for entry in versions], [1] * len(versions))
    result.metrics["weights.model_bytes"] = float(versions[-1].model_bytes) if versions else 0.0
    numbers = {entry.number: entry for entry in versions}
    spread: dict[int, list[float]] = {}
    for ack in found.acks:
        for served in ack.history:
            if served.version in numbers:
                spread.setdefault(served.version, []).append(max(served.at - served.published_at, 0.0))
    result.distribution("weights.publish_to_serving_seconds", [value for values in spread.values() for value in values])
    result.distribution("weights.publish_to_first_serving_seconds", [min(values) for values in spread.values()])
    full = max((len(values) for values in spread.values()), default=0)
    result.distribution("weights.publish_to_all_seconds", [max(values) for values in spread.values() if len(values) == full])
    result.metrics["weights.replicas_acknowledged"] = float(full)
    result.distribution("weights.prepare_seconds", [ack.prepare_seconds for ack in found.acks])
    result.distribution("weights.pause_seconds", [ack.pause_seconds for ack in found.acks])
    first: dict[int, float] = {}
    for life in found.lives.values():
        if life.version_start in numbers:
            began = life.finished_at - life.generate_seconds
            first[life.version_start] = min(first.get(life.version_start, np.inf), began)
    result.distribution(
        "weights.publish_to_first_token_seconds", [max(at - numbers[number].at, 0.0) for number, at in first.items()]
    )
    result.series["publish"] = {
        "depth": [float(entry.depth) for entry in versions],
        "encode": [entry.encode_seconds for entry in versions],
        "upload": [entry.upload_seconds for entry in versions],
        "verify": [entry.verify_seconds for entry in versions],
        "until first serves": [min(spread.get(entry.number, [0.0])) for entry in versions],
        "until all serve": [
            max(values := spread.get(entry.number, [0.0])) - min(values) for entry in versions
        ],
    }  # fmt: skip


def _errors(result: Result, found: Lives, looks: Looks) -> None:
    metrics = result.metrics
    metrics["errors.failed_attempts"] = float(found.failures.total())
    for stage, count in found.failures.items():
        metrics[f"errors.failed_attempts.{stage}"] = float(count)
    metrics["errors.reissues"] = float(found.reissues.total())
    for reason, count in found.drops.items():
        metrics[f"dropped.{reason}"] = float(count)
    if looks.lane:
        issued = len(found.admitted) + found.reissues.total()
        given = int(looks.lane["delivered"]["consumer_seq"])
        unique = issued - int(looks.lane.get("num_pending", 0))
        metrics["redeliveries.tasks"] = float(max(given - unique, 0))
    metrics["epochs"] = float(found.epochs)
    metrics["depth_reached"] = float(found.versions[-1].depth if found.versions else 0)


def _without_history(result: Result, looks: Looks, begin: float, end: float) -> None:
    """Streams were purged: rates are the workers' own counts, and what the streams would have to tell is left out."""
    rows = [row for row in looks.rows if begin <= row["at"] < end and "workers.trajectories" in row]
    for metric, name in (("samples_per_second", "workers.trajectories"), ("tokens_per_second", "workers.tokens")):
        grown = sum(max(after[name] - before[name], 0.0) for before, after in pairwise(rows))
        result.metrics[metric] = grown / (rows[-1]["at"] - rows[0]["at"]) if len(rows) > 1 else 0.0
    for name in ("redeliveries.tasks", "offered_samples_per_second", "admitted_samples", "dropped_stale_share", "dropped_share"):
        result.metrics.pop(name, None)


def _memory(result: Result, looks: Looks, begin: float) -> None:
    """Growth over the last three quarters of the window by a straight line, as a share of what a process has; Towline's own
    processes apart from the two servers, whose caches fill."""
    rows = [row for row in looks.rows if row["at"] >= begin]
    rows = rows[len(rows) // 4 :]
    names = sorted({name for row in rows for name in row if name.startswith("rss.")})
    worst, servers = 0.0, 0.0
    for name in names:
        points = [(row["at"], row[name]) for row in rows if name in row]
        if len(points) < 4:
            continue
        at, size = np.array(points).T
        result.metrics[f"{name}_bytes"] = float(size.max())
        slope = float(np.polyfit(at - at[0], size, 1)[0])
        result.metrics[f"{name}_growth_share"] = slope * float(at[-1] - at[0]) / float(size.mean())
        if name.endswith("-server"):
            servers = max(servers, result.metrics[f"{name}_growth_share"])
        else:
            worst = max(worst, result.metrics[f"{name}_growth_share"])
    result.metrics["memory_growth_share"], result.metrics["memory_growth_share.servers"] = worst, servers


def _flow(found: Lives) -> dict[str, list[float]]:
    """Events a second over the run: what a kill leaves behind, and how long."""
    start = found.began_at
    columns = {
        "admitted": found.admitted,
        "durable": [life.durable_at for life in found.lives.values()],
        "scored": [life.scored_at for life in found.lives.values() if life.scored_at is not None],
        "failed": found.failed_at,
    }
    last = max((max(values) for values in columns.values() if values), default=start)
    edges = np.arange(start, last + BIN_SECONDS, BIN_SECONDS)
    if edges.size < 2:
        return {"seconds": []}
    flow = {name: (np.histogram(values, edges)[0] / BIN_SECONDS).tolist() for name, values in columns.items()}
    trained = np.histogram([b.at for b in found.batches], edges, weights=[b.rows for b in found.batches])[0] / BIN_SECONDS
    return {"seconds": (edges[:-1] + BIN_SECONDS / 2 - start).tolist(), **flow, "trained": trained.tolist()}
