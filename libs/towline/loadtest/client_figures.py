"""What clients saw, as figures: rates, latencies, TTFT, ITL, TPOT, errors by kind, refusals apart, what each tenant got.

The meanings are sglang's and guidellm's. Every time counts from `meant`, the moment at which the request was to be sent, so
that a client that was held up makes the gateway's figures worse, never better.

- TTFT: to the first token that arrives (sglang bench_serving `output.ttft`, guidellm `time_to_first_token_ms`). Of streams alone.
- ITL: the time between tokens. A piece of n tokens that came t after the one before it counts as n gaps of t / n, as
  bench_serving does for /generate (`adjust_itl`), since a piece isn't a token. guidellm has one mean a request,
  (last - first) / (tokens - 1) (`inter_token_latency_ms`): the mean of a request's gaps here is within one piece of it.
- TPOT: (latency - TTFT) / (tokens - 1), bench_serving's `tpots`. `tpot_whole` is guidellm's `time_per_output_token_ms`:
  (last token - start) / tokens, the first one's time included.
- Latency: to the answer's end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from towline.loadtest.result import Result

OK = "ok"
REFUSED = ("refused.429", "refused.503")
"""Answers that say: not now. They aren't errors: the gateway protects itself by them, and a client comes back."""


@dataclass(slots=True)
class Call:
    """One request. Unix seconds; `first` 0 where no token came, or none can be told from the rest."""

    tenant: str
    kind: str
    """stream, whole, turn, open, claim or finish."""
    meant: float
    began: float
    first: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    outcome: str = OK
    versions: list[int] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the piece before, tokens) of each piece but the first."""

    @property
    def latency(self) -> float:
        return self.ended - self.meant

    def piece(self, count: int, versions: Iterable[int], last: float) -> float:
        """Note `count` tokens that come now; `last` is when the piece before did, and what this returns, the next one's."""
        self.versions += [version for version in dict.fromkeys(versions) if version not in self.versions]
        if not count:
            return last
        now = time.time()
        if self.first:
            self.gaps.append((round(now - last, 6), count))
        else:
            self.first = now
        self.tokens += count
        return now


def tell(result: Result, name: str, calls: Sequence[Call], began: float, seconds: float) -> None:
    """Metrics `NAME.…` and their distributions. Rates are those of answers that ended within `seconds` of `began`."""
    metrics = result.metrics
    good = [call for call in calls if call.outcome == OK]
    inside = [call for call in good if began <= call.ended < began + seconds]
    metrics[f"{name}.requests"] = float(len(calls))
    metrics[f"{name}.requests_per_second"] = len(inside) / seconds
    metrics[f"{name}.tokens_per_second"] = sum(call.tokens for call in inside) / seconds
    result.distribution(f"{name}.latency_seconds", [call.latency for call in good])
    streams = [call for call in good if call.first]
    result.distribution(f"{name}.ttft_seconds", [call.first - call.meant for call in streams])
    result.distribution(
        f"{name}.itl_seconds", [gap / count for call in streams for gap, count in call.gaps for _ in range(count)]
    )
    result.distribution(
        f"{name}.tpot_seconds", [(call.ended - call.first) / (call.tokens - 1) for call in streams if call.tokens > 1]
    )
    result.distribution(f"{name}.tpot_whole_seconds", [call.latency / call.tokens for call in streams if call.tokens])
    outcomes = Counter(call.outcome for call in calls if call.outcome != OK)
    refused = sum(outcomes.pop(kind, 0) for kind in REFUSED)
    metrics[f"{name}.refused"], metrics[f"{name}.errors"] = float(refused), float(sum(outcomes.values()))
    metrics[f"{name}.refused_share"] = refused / max(len(calls), 1)
    for kind, count in outcomes.items():
        metrics[f"{name}.errors.{kind}"] = float(count)
    metrics[f"{name}.late_seconds"] = max((call.began - call.meant for call in calls), default=0.0)
    versions = sorted({version for call in calls for version in call.versions})
    metrics[f"{name}.versions"] = float(len(versions))


def kept_up(calls: Sequence[Call], began: float, seconds: float) -> float:
    """Answers a second in the second half of an open loop: by then a system that doesn't keep up has fallen behind."""
    half = seconds / 2
    return sum(call.outcome == OK and began + half <= call.ended < began + seconds for call in calls) / half


def fairness(result: Result, calls: Sequence[Call], clients: dict[str, int], began: float, seconds: float) -> None:
    """What each tenant got, and Jain's index of what each of its clients got: 1 where all got the same, 1/n where one got all.

    (R. Jain, D. Chiu, W. Hawe: A quantitative measure of fairness and discrimination, 1984.)
    """
    rows, each = [], []
    total = sum(clients.values())
    for tenant, count in clients.items():
        own = [call for call in calls if call.tenant == tenant]
        name = f"tenants.{tenant}"
        tell(result, name, own, began, seconds)
        rate = result.metrics[f"{name}.requests_per_second"]
        each += [rate / count] * count
        rows.append(
            {
                "tenant": tenant, "clients": count, "requests_per_second": rate, "share_of_clients": count / total,
                "latency_p50": result.metrics.get(f"{name}.latency_seconds.p50", 0.0),
                "latency_p99": result.metrics.get(f"{name}.latency_seconds.p99", 0.0),
                "refused": result.metrics[f"{name}.refused"], "errors": result.metrics[f"{name}.errors"],
            }
        )  # fmt: skip
    result.tables["tenants"] = rows
    result.metrics["tenants.fairness"] = jain(each)


def jain(shares: Sequence[float]) -> float:
    values = np.asarray(shares, np.float64)
    squares = float((values**2).sum())
    return float(values.sum() ** 2 / (values.size * squares)) if squares else 0.0
