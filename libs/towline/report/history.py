"""A run's history as numbers over steps and seconds, read off its two logs and its outcomes: what the report draws.

Nothing here is what a service said of itself, so a bundle on another machine gives the same history as the run itself.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from towline.bundle.line import BatchAt, read_batches, steps
from towline.bundle.source import Source
from towline.bus.topology import CONTROL, OUTCOME
from towline.contract.control import BatchRecord, DropRecord, EvalRecord, decode_control
from towline.contract.entries import OpenEntry, VersionEntry
from towline.contract.outcome import Failure, Score, decode_outcome
from towline.contract.policy import Ack
from towline.errors import MalformedError


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """A batch of the line. Staleness in depths: the batch's less the least among a row's policy tokens."""

    depth: int
    at: float
    rows: int
    reward_mean: float
    staleness: Counter[int]
    """Staleness -> rows."""
    policy_tokens: int


@dataclass(frozen=True, slots=True)
class ScorePoint:
    """A scored sample of the lane `train`, in the order of OUTCOME. `lag`: depths between the line's head when it was scored
    and the newest version that sampled it; None for a version that isn't known."""

    at: float
    policy_tokens: int
    version: int
    lag: int | None


@dataclass(slots=True)
class History:
    """Times are Unix seconds."""

    run: str
    began_at: float
    batches: list[BatchPoint] = field(default_factory=list)
    void_batches: int = 0
    """Batches that no version of the line consumed: voided by a fork, or not consumed yet."""
    evals: list[tuple[int, float]] = field(default_factory=list)
    """(depth, held-out mean), by depth."""
    versions: list[VersionEntry] = field(default_factory=list)
    """Of the line, oldest first."""
    forks: int = 0
    """`open` entries after the first."""
    drops: Counter[str] = field(default_factory=Counter)
    """Reason -> samples."""
    failures: Counter[str] = field(default_factory=Counter)
    """Stage -> failed attempts."""
    scores: list[ScorePoint] = field(default_factory=list)
    acks: list[Ack] = field(default_factory=list)

    def first_use_seconds(self) -> list[float]:
        """For each version of the line that was sampled from: seconds from its entry to its first scored sample. The entry's
        clock is the publisher's, the sample's the bus's."""
        committed = {entry.number: entry.at for entry in self.versions}
        first: dict[int, float] = {}
        for score in self.scores:
            if score.version in committed:
                first.setdefault(score.version, score.at - committed[score.version])
        return [max(seconds, 0.0) for _, seconds in sorted(first.items())]


async def read_history(source: Source) -> History:
    """All of it. Raises `MissingError` where the LOG has no lineage yet."""
    log, lineage = source.log, source.log.lineage
    history = History(source.settings.run.name, log.entry(0).at)
    batches = await read_batches(source)
    used: list[BatchAt] = [batch for step in steps(log, batches) for batch in step.batches]
    history.batches = [point_of(batch.record) for batch in used]
    history.void_batches = len(batches) - len(used)
    history.versions = [log.version(number) for number in lineage.path() if number]
    history.forks = max(sum(isinstance(entry, OpenEntry) for entry in log.entries()) - 1, 0)
    await _read_decisions(source, history)
    await _read_outcomes(source, history)
    history.acks = await source.acks()
    return history


def point_of(record: BatchRecord) -> BatchPoint:
    """What a batch adds to the curves."""
    rows = record.rows
    return BatchPoint(
        depth=record.for_depth,
        at=record.at,
        rows=len(rows),
        reward_mean=float(np.mean([row.reward for row in rows])) if rows else 0.0,
        staleness=Counter(record.for_depth - row.least_depth for row in record.within_bound),
        policy_tokens=sum(row.policy_tokens for row in rows),
    )


async def _read_decisions(source: Source, history: History) -> None:
    means: dict[int, float] = {}
    subjects = [source.topology.control(kind) for kind in ("eval", "drop")]
    async with contextlib.aclosing(source.read(CONTROL, subjects=subjects)) as messages:
        async for message in messages:
            record = decode_control(message.data)
            if isinstance(record, DropRecord):
                history.drops[record.reason] += record.samples
            elif isinstance(record, EvalRecord) and record.mean is not None and source.log.lineage.on_line(record.version):
                means.setdefault(record.depth, record.mean)
    history.evals = sorted(means.items())


async def _read_outcomes(source: Source, history: History) -> None:
    lineage = source.log.lineage
    known = set(lineage.versions())
    commits = sorted((entry.at, entry.depth) for entry in history.versions)
    times = [at for at, _ in commits]
    async with contextlib.aclosing(source.read(OUTCOME)) as messages:
        async for message in messages:
            try:
                outcome = decode_outcome(message.data)
            except MalformedError:
                continue  # it's in DEAD and in the audit; here it has no numbers
            if isinstance(outcome, Failure):
                history.failures[outcome.stage] += 1
            elif isinstance(outcome, Score) and outcome.lane == "train" and outcome.version_spans:
                version = outcome.version_spans[-1].version
                place = bisect_right(times, message.at)
                head = commits[place - 1][1] if place else 0
                lag = max(head - lineage.effective_depth(version), 0) if version in known else None
                history.scores.append(ScorePoint(message.at, outcome.policy_tokens, version, lag))
