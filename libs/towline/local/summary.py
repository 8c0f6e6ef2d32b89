"""What a run came to: runs/RUN/summary.json, read off the two logs; only times and rates come from what the services said.

Keys are stable. Rewards are the held-out means of the first and the last evaluation (of the first and last batch where the run
has none); `phase_seconds` are means per version, `commit` being the publisher's verification and commit; `samples` are the
audit's counts of both lanes, so admitted = trained + evaluated + dropped + open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from towline.audit.report import AuditReport
from towline.bus.client import Bus
from towline.bus.topology import CONTROL
from towline.contract.control import BatchRecord, EvalRecord, Record, decode_control
from towline.contract.entries import VersionEntry
from towline.report.figures import FigureBook
from towline.store.lineage import Lineage
from towline.store.log import Log


@dataclass(frozen=True, slots=True)
class Staleness:
    """Of trained samples, in depths: the batch's depth less the least depth of the versions that sampled it."""

    mean: float
    p99: float
    max: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Means over the committed deltas; `ratio_mean` is model bytes / wire bytes."""

    wire_bytes_mean: float
    density_mean: float
    ratio_mean: float


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    encode: float
    upload: float
    commit: float
    prepare: float
    pause: float


@dataclass(frozen=True, slots=True)
class Summary:
    run: str
    steps: int
    versions_committed: int
    reward_first: float | None
    reward_last: float | None
    samples: dict[str, Any]
    staleness: Staleness
    delta: Delta
    phase_seconds: PhaseSeconds
    trajectories_per_s: float
    tokens_per_s: float
    trainer_idle_share: float
    wall_seconds: float
    held_out: bool = True
    """Whether the rewards are those of evaluations; else of batches."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class ControlFold:
    """CONTROL's batches and evaluations."""

    batches: dict[tuple[int, int], BatchRecord] = field(default_factory=dict)
    """By (epoch, for_depth)."""
    evals: dict[int, EvalRecord] = field(default_factory=dict)
    """By version."""

    def add(self, record: Record) -> None:
        if isinstance(record, BatchRecord):
            self.batches.setdefault((record.epoch, record.for_depth), record)
        elif isinstance(record, EvalRecord):
            self.evals.setdefault(record.version, record)

    def lineage_batches(self, lineage: Lineage) -> list[BatchRecord]:
        """The batches that `latest` was trained on: batch j is that of the epoch whose version raised the depth past j."""
        found = []
        for depth in range(lineage.depth(lineage.latest)):
            version = lineage.version_reaching(depth + 1)
            epoch = None if version is None else lineage.epoch_of(version)
            batch = None if epoch is None else self.batches.get((epoch, depth))
            if batch is not None:
                found.append(batch)
        return found


async def read_control(bus: Bus) -> ControlFold:
    """All of CONTROL as it stands."""
    fold = ControlFold()
    subjects = [bus.topology.control(kind) for kind in ("batch", "eval")]
    async with contextlib.aclosing(bus.read(CONTROL, subjects=subjects, follow=False)) as messages:
        async for message in messages:
            fold.add(decode_control(message.data))
    return fold


def summarise(run: str, log: Log, control: ControlFold, audit: AuditReport, book: FigureBook) -> Summary:
    """`log` refreshed; `book` with every process's last figures."""
    lineage = log.lineage
    batches = control.lineage_batches(lineage)
    rows = [(batch.for_depth, row) for batch in batches for row in batch.within_bound]
    versions = [entry for entry in log.entries() if isinstance(entry, VersionEntry)]
    wall = max(book.wall_seconds, 1e-9)
    first, last = _rewards(control, batches)
    idle = book.total("trainer", "idle_seconds")
    return Summary(
        run=run,
        steps=lineage.depth(lineage.latest),
        versions_committed=len(versions),
        reward_first=first,
        reward_last=last,
        samples=audit.as_dict()["samples"],
        staleness=_staleness([depth - row.least_depth for depth, row in rows]),
        delta=_delta(entry for entry in versions if entry.representation == "delta"),
        phase_seconds=_phases(versions, book),
        trajectories_per_s=book.sampled("trajectories") / wall,
        tokens_per_s=book.sampled("tokens") / wall,
        trainer_idle_share=min(idle / wall, 1.0),
        wall_seconds=book.wall_seconds,
        held_out=any(record.mean is not None for record in control.evals.values()),
    )


def _rewards(control: ControlFold, batches: list[BatchRecord]) -> tuple[float | None, float | None]:
    means = [record.mean for _, record in sorted(control.evals.items()) if record.mean is not None]
    if not means:
        means = [_mean(row.reward for row in batch.rows) for batch in batches if batch.rows]
    return (means[0], means[-1]) if means else (None, None)


def _staleness(values: list[int]) -> Staleness:
    if not values:
        return Staleness(0.0, 0.0, 0)
    return Staleness(float(np.mean(values)), float(np.percentile(values, 99)), max(values))


def _delta(entries: Iterable[VersionEntry]) -> Delta:
    deltas = list(entries)
    return Delta(
        wire_bytes_mean=_mean(entry.wire_bytes for entry in deltas),
        density_mean=_mean(entry.density for entry in deltas),
        ratio_mean=_mean(entry.model_bytes / max(entry.wire_bytes, 1) for entry in deltas),
    )


def _phases(versions: list[VersionEntry], book: FigureBook) -> PhaseSeconds:
    activations = book.total("rollout_worker", "activations")
    committed = book.total("publisher", "committed")
    return PhaseSeconds(
        encode=_mean(entry.encode_seconds for entry in versions),
        upload=_mean(entry.upload_seconds for entry in versions),
        commit=_share(book.total("publisher", "verify_seconds") + book.total("publisher", "commit_seconds"), committed),
        prepare=_share(book.total("rollout_worker", "prepare_seconds"), activations),
        pause=_share(book.total("rollout_worker", "pause_seconds"), activations),
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def _share(total: float, count: float) -> float:
    return total / count if count else 0.0
