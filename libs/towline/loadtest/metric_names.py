"""Which metrics a load test can have: so that a threshold on one that it can't is refused before hours of load, not after.

Patterns stand here, not lists, since names have parts of the scenario's own (payloads, rates, tenants). Real results are held
against them by tests, so that a new metric can't be forgotten.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, get_args

from towline.contract.outcome import FailureStage

if TYPE_CHECKING:
    from towline.loadtest.scenario import Load

_QUANTILES = ("p50", "p90", "p99", "p99.9", "mean", "max", "count")
_RATES = ("offered_samples", "samples", "tokens", "bytes", "trained_samples", "goodput_tokens", "batches")
_HOPS = ("task_to_pulled", "generate", "finished_to_durable", "durable_to_scored", "scored_to_batched", "task_to_batched")
_TIMINGS = ("ttft", "itl", "tpot", "tpot_whole")
_WEIGHTS = (
    "encode", "upload", "verify", "prepare", "pause", "publish_to_serving", "publish_to_first_serving", "publish_to_all",
    "publish_to_first_token",
)  # fmt: skip
_PROCESS = r"rss\.[A-Za-z0-9_.-]+_(bytes|growth_share)"
_RUN_SPREADS = [
    *(f"hop.{name}" for name in _HOPS), *(f"{name}_seconds" for name in _TIMINGS), *(f"weights.{n}_seconds" for n in _WEIGHTS),
    "weights.wire_bytes", "sample.bytes", "sample.tokens", "engine.queue_seconds", "staleness", "policy_age_seconds",
]  # fmt: skip
_DROPPED = r"dropped\.[a-z_]+"
"""By the reasons that records give, which are words of whoever dropped."""
_STAGES = [f"errors.failed_attempts.{stage}" for stage in get_args(FailureStage)]
_RUN = [
    *(f"{name}_per_second" for name in _RATES), *_STAGES, "workers", "measured_seconds", "staleness_bound", "over_bound_rows",
    "admitted_samples", "dropped_stale_share", "dropped_share", "length_bias", "trainer_idle_share", "trainer.publish_seconds",
    "trainer.snapshot_seconds", "slots_busy_share", "weights.versions_per_second", "weights.model_bytes",
    "weights.replicas_acknowledged", "errors.failed_attempts", "errors.reissues", "redeliveries.tasks", "epochs", "depth_reached",
    "memory_growth_share", "memory_growth_share.servers", "audit.violations", "audit.rows_checked", "audit.open",
]  # fmt: skip
_CLIENT = [
    "requests", "requests_per_second", "tokens_per_second", "refused", "errors", "refused_share", "late_seconds", "versions",
]  # fmt: skip
_COST = ["gateway_cpu_seconds_per_request", "gateway_cores", "clients_cpu_seconds_per_request", "gateway_rss_bytes"]
_ERRORS = r"errors\.[A-Za-z0-9_.]+"
"""By kind: what the other side calls it."""
_CALLS = ("open", "turn", "finish", "claim")


def known(name: str, load: Load) -> bool:
    """Whether a load test of this kind can have the metric."""
    plain, patterns = _names(load)
    return name in plain or any(re.fullmatch(pattern, name) for pattern in patterns)


def counted(name: str) -> bool:
    """Whether a metric of this name that a result lacks is a count of 0: of a reason that never arose."""
    return bool(re.fullmatch(rf"{_DROPPED}|(.+\.)?{_ERRORS}", name)) and name != "errors.reissues"


def faults(load: Load) -> list[str]:
    """A line for each threshold on a metric that there can't be."""
    plain, _ = _names(load)
    found = []
    for name in load.thresholds:
        if not known(name, load):
            near = difflib.get_close_matches(name, plain, 3, 0.6)
            hint = f"; is it {' or '.join(near)}?" if near else "; a result's `metrics` has them all"
            found.append(f'load.thresholds."{name}": a load test of kind {load.kind} has no such metric{hint}')
    return found


def _spread(names: Iterable[str]) -> list[str]:
    return [f"{name}.{quantile}" for name in names for quantile in _QUANTILES]


def _names(load: Load) -> tuple[list[str], list[str]]:
    """(names, patterns of the others)."""
    if load.kind == "transport":
        return _transport(load), []
    if load.kind == "run":
        return [*_RUN, *_spread(_RUN_SPREADS)], [_DROPPED, _PROCESS]
    parts = _gateway_parts(load)
    names = [f"{part}.{name}" for part in parts for name in (*_CLIENT, *_COST)]
    names += [f"bare.{name}" for name in ("bare_cpu_seconds_per_request", "bare_cores", "bare_rss_bytes")]
    names += [f"sessions.{name}" for name in ("finished", "unclaimed", *_COST)]
    names += [f"idle.{name}" for name in ("streams", "asked", "gateway_bytes_per_stream", "gateway_cores_alone")]
    names += [f"overhead.{name}_seconds.{q}" for name in ("latency", "ttft") for q in ("p50", "p90", "p99")]
    names += ["closed.share_of_bare", "knee_per_second", "tenants.fairness", "versions_seen"]
    names += _spread(f"{part}.{name}_seconds" for part in parts for name in ("latency", *_TIMINGS))
    names += _spread(["cold.ttft_seconds"])
    patterns = [rf"({'|'.join(map(re.escape, parts))})\.{_ERRORS}", _DROPPED, _PROCESS]
    return [*names, *_RUN, *_spread(_RUN_SPREADS)], patterns


def _transport(load: Load) -> list[str]:
    rates = [f"rate.{rate:g}" for rate in load.rates]
    pairs = [(system, size) for system in ("towline", "nats", "s3") for size in load.payload_bytes]
    names = [f"{system}.{size}.{name}" for system, size in pairs
             for name in ("messages_per_second", "bytes_per_second", "cpu_seconds_per_message", "twice")]  # fmt: skip
    names += [f"towline.{size}.share_of_{other}" for size in load.payload_bytes for other in ("nats", "s3")]
    spreads = [*(f"{system}.{size}" for system, size in pairs), *rates, "burst"]
    names += [f"{rate}.achieved_per_second" for rate in rates]
    return [*names, "offered_per_second", "burst.twice", "knee_per_second", *_spread(f"{one}.latency_seconds" for one in spreads)]


def _gateway_parts(load: Load) -> list[str]:
    mine = load.gateway
    rates = [f"rate.{rate:g}" for rate in mine.rates]
    tenants = [f"tenants.{tenant}" for tenant in mine.tenants]
    return ["closed", "bare", "grpc", "idle", *rates, *tenants, *(f"sessions.{call}" for call in _CALLS)]
