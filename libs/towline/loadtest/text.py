"""A load test's verdict in a few lines of text: the figures that are asked for first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from towline.loadtest.result import Result

ASKED = (
    ("samples_per_second", "samples/s", 1.0), ("tokens_per_second", "policy tokens/s", 1.0),
    ("goodput_tokens_per_second", "trained tokens/s within the bound", 1.0), ("batches_per_second", "batches/s", 1.0),
    ("hop.task_to_pulled.p99", "task to worker p99, ms", 1e3),
    ("hop.finished_to_durable.p99", "finished to durable p99, ms", 1e3),
    ("hop.durable_to_scored.p99", "durable to scored p99, ms", 1e3), ("staleness.mean", "staleness mean, depths", 1.0),
    ("policy_age_seconds.p50", "policy age p50, s", 1.0), ("dropped_stale_share", "dropped as stale, share", 1.0),
    ("length_bias", "length bias", 1.0), ("trainer_idle_share", "trainer idle, share", 1.0),
    ("slots_busy_share", "slots busy, share", 1.0),
    ("ttft_seconds.p50", "TTFT p50, ms", 1e3), ("itl_seconds.p50", "ITL p50, ms", 1e3),
    ("weights.publish_to_serving_seconds.p50", "version to a worker p50, ms", 1e3),
    ("weights.publish_to_all_seconds.p50", "version to all workers p50, ms", 1e3),
    ("weights.publish_to_first_token_seconds.p50", "version to its first token p50, ms", 1e3),
    ("errors.failed_attempts", "failed attempts", 1.0), ("redeliveries.tasks", "redelivered tasks", 1.0),
    ("closed.requests_per_second", "closed loop, requests/s", 1.0), ("closed.tokens_per_second", "closed loop, tokens/s", 1.0),
    ("closed.latency_seconds.p50", "closed loop, latency p50, ms", 1e3),
    ("closed.latency_seconds.p99", "closed loop, latency p99, ms", 1e3),
    ("closed.ttft_seconds.p50", "closed loop, TTFT p50, ms", 1e3), ("closed.itl_seconds.p50", "closed loop, ITL p50, ms", 1e3),
    ("closed.tpot_seconds.p50", "closed loop, TPOT p50, ms", 1e3), ("closed.share_of_bare", "share of the engine alone", 1.0),
    ("overhead.latency_seconds.p50", "over the engine alone, latency p50, ms", 1e3),
    ("overhead.ttft_seconds.p50", "over the engine alone, TTFT p50, ms", 1e3),
    ("closed.gateway_cpu_seconds_per_request", "gateway's processor time, ms a request", 1e3),
    ("sessions.turn.requests_per_second", "sessions, turns/s", 1.0),
    ("sessions.turn.ttft_seconds.p50", "sessions, a turn's TTFT p50, ms", 1e3), ("sessions.finished", "sessions finished", 1.0),
    ("tenants.fairness", "fairness over tenants' clients (Jain)", 1.0), ("grpc.requests_per_second", "gRPC, requests/s", 1.0),
    ("idle.streams", "idle streams, open to the end", 1.0),
    ("idle.gateway_cores_alone", "gateway's cores for them alone", 1.0),
    ("idle.gateway_bytes_per_stream", "gateway's memory, kB an idle stream", 1e-3),
    ("idle.latency_seconds.p50", "beside them, latency p50, ms", 1e3), ("versions_seen", "versions that answered", 1.0),
    ("memory_growth_share", "memory growth, share", 1.0), ("knee_per_second", "knee, messages/s", 1.0),
    ("burst.latency_seconds.p99", "burst p99, ms", 1e3),
)  # fmt: skip


def value(results: Sequence[Result], name: str) -> float | None:
    """The median over repetitions."""
    found = [result.metrics[name] for result in results if name in result.metrics]
    return float(np.median(found)) if found else None


def numbers_of_workers(results: Sequence[Result]) -> list[int]:
    """Each once, from the least."""
    return sorted({int(result.load["workers"]) for result in results})


def largest(results: Sequence[Result]) -> list[Result]:
    """The runs with the most workers: figures of different fleets have no median."""
    most = numbers_of_workers(results)[-1]
    return [result for result in results if int(result.load["workers"]) == most]


def rows(results: Sequence[Result]) -> list[tuple[str, float]]:
    """What a reader asks for first, then what a transport test has."""
    found = [(label, got * scale) for name, label, scale in ASKED if (got := value(results, name)) is not None]
    for name in sorted(results[0].metrics, key=_naturally):
        if name.endswith((".messages_per_second", ".achieved_per_second")) or ".share_of_" in name:
            got = value(results, name)
            assert got is not None
            found.append((name, got))
    return found


def _naturally(name: str) -> list[tuple[int, float, str]]:
    """rate.400 stands before rate.1600."""
    return [(0, float(part), "") if part.isdigit() else (1, 0.0, part) for part in name.split(".")]


def summary(results: Sequence[Result]) -> list[str]:
    first = results[0]
    lines = [f"{first.scenario} at {first.commit}, {first.machine['cpu']}, {first.machine['cores']} cores"]
    counts = numbers_of_workers(results)
    for count in counts if len(counts) > 1 else []:
        some = [result for result in results if int(result.load["workers"]) == count]
        lines.append(
            f"  {count:>6} workers: {_short(value(some, 'samples_per_second') or 0.0)} samples/s, "
            f"{_short(value(some, 'goodput_tokens_per_second') or 0.0)} trained tokens/s"
        )
    lines += [f"  {label:<46} {_short(number)}" for label, number in rows(largest(results))]
    if "audit.violations" in first.metrics:
        violations = sum(len(result.violations) for result in results)
        checked = sum(result.metrics["audit.rows_checked"] for result in results)
        lines.append(f"  {'audit':<46} {'clean' if not violations else f'{violations} violations'}, {checked:,.0f} rows read")
    return lines


def _short(number: float) -> str:
    """Four digits, and no powers of ten."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"
