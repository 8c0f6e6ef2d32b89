"""How a fleet follows: who serves what, how far back the slowest is, how long a version takes until everyone serves it.

Pure, from the registry and the acks alone: an ack tells of the versions before it, so no LOG has to be read.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from towline.contract.policy import Ack, ReplicaInfo, Served, decode_ack, decode_replica
from towline.errors import MalformedError

T = TypeVar("T")
FOLLOWING = frozenset({"latest", "canary"})
"""Subscriptions whose replicas go to each new version as soon as they may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A live replica. `behind_seconds`: how long there has been a newer version than its own; None where it serves none."""

    replica: str
    host: str
    state: str
    subscription: str
    version: int | None
    behind_seconds: float | None
    detail: str
    failed: dict[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Seconds throughout. Pinned replicas count among the members and for nothing else."""

    members: list[Member] = field(default_factory=list)
    serving: dict[int, int] = field(default_factory=dict)
    """Version -> how many serve it, the newest first."""
    latest: int | None = None
    """The newest version that any replica has acknowledged."""
    slowest: str | None = None
    slowest_behind_seconds: float = 0.0
    converged: int = 0
    """Versions that all replicas which follow have come to serve, or passed; as far back as acks tell."""
    publish_to_all_p50_seconds: float | None = None
    publish_to_all_p99_seconds: float | None = None


def fleet_of(replicas: Iterable[ReplicaInfo], acks: Iterable[Ack], *, now: float) -> Fleet:
    """`now` and all times are seconds of the epoch, each of the clock of who wrote it."""
    infos = sorted(replicas, key=lambda info: info.replica)
    history = {ack.replica: _history(ack) for ack in acks}
    published = {row.version: row for rows in history.values() for row in rows}
    order = sorted(published.values(), key=lambda row: row.published_at)
    members = [_member(info, published, order, now) for info in infos]
    counted = Counter(member.version for member in members if member.version is not None)
    newest_first = sorted(counted, key=lambda version: (version in published and published[version].published_at, version))
    # Whoever serves nothing yet isn't behind but missing, which its state says.
    following = [member for member in members if member.subscription != "pinned" and member.behind_seconds is not None]
    slowest = max(following, key=lambda member: member.behind_seconds or 0.0, default=None)
    rows = [history[info.replica] for info in infos if info.subscription in FOLLOWING and history.get(info.replica)]
    took = sorted(seconds for row in order if (seconds := _publish_to_all(row, rows)) is not None)
    return Fleet(
        members=members,
        serving={version: counted[version] for version in reversed(newest_first)},
        latest=order[-1].version if order else None,
        slowest=slowest.replica if slowest is not None and slowest.behind_seconds else None,
        slowest_behind_seconds=(slowest.behind_seconds or 0.0) if slowest is not None else 0.0,
        converged=len(took),
        publish_to_all_p50_seconds=_quantile(took, 0.50),
        publish_to_all_p99_seconds=_quantile(took, 0.99),
    )


def decode_fleet(replicas: Mapping[str, bytes], acks: Mapping[str, bytes], *, now: float) -> Fleet:
    """From the items of the buckets `replicas` and `acks`; entries of another release are left out."""
    return fleet_of(decoded(replicas, decode_replica), decoded(acks, decode_ack), now=now)


def decoded(items: Mapping[str, bytes], decode: Callable[[bytes], T]) -> list[T]:
    """Those of this release."""
    found = []
    for data in items.values():
        with contextlib.suppress(MalformedError):
            found.append(decode(data))
    return found


def _history(ack: Ack) -> Sequence[Served]:
    """By the time of the ack; empty where the replica is of a release that told none."""
    return sorted(ack.history, key=lambda row: row.at)


def _member(info: ReplicaInfo, published: Mapping[int, Served], order: Sequence[Served], now: float) -> Member:
    behind: float | None = None
    if info.version is not None and info.version in published:
        own = published[info.version].published_at
        newer = next((row for row in order if row.published_at > own), None)
        behind = max(now - newer.published_at, 0.0) if newer is not None else 0.0
    return Member(
        replica=info.replica, host=info.host, state=info.state, subscription=info.subscription, version=info.version,
        behind_seconds=behind, detail=info.detail, failed=dict(info.failed),
    )  # fmt: skip


def _publish_to_all(version: Served, histories: Iterable[Sequence[Served]]) -> float | None:
    """From its publication until the last of those that were there served it or a newer one; None while one of them doesn't."""
    last: float | None = None
    for rows in histories:
        if min(row.published_at for row in rows) > version.published_at:
            continue  # came later, or has served so much since that it doesn't tell of this one
        reached = next((row.at for row in rows if row.published_at >= version.published_at), None)
        if reached is None:
            return None
        last = max(last or 0.0, reached)
    return max(last - version.published_at, 0.0) if last is not None else None


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """Nearest rank."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else None
