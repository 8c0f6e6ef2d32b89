"""A finished run's samples and versions, from its streams and logs alone: where each was when, without any instrument in the way.

Times are those that the bus gave messages and that the writers wrote; on one machine all are one clock's. On a cluster hops
between machines hold their clocks' difference.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field

from towline.bus.client import Bus
from towline.bus.topology import ACKS, CONTROL, OUTCOME, TRAJECTORY
from towline.contract.control import (
    BatchRecord,
    DropRecord,
    EndRecord,
    ReissueRecord,
    TaskRecord,
    decode_control,
)
from towline.contract.entries import OpenEntry, VersionEntry
from towline.contract.outcome import Failure, Score, decode_outcome
from towline.contract.policy import Ack, decode_ack
from towline.contract.task import TRAIN
from towline.contract.trajectory import decode_trajectory
from towline.errors import MalformedError
from towline.store.log import Log


@dataclass(slots=True, kw_only=True)
class Life:
    """A trajectory's. Unix seconds; None for what never happened."""

    task_at: float | None
    attempt: int
    pulled_at: float
    finished_at: float
    queue_seconds: float
    generate_seconds: float
    durable_at: float
    tokens: int
    """The policy's."""
    version_start: int
    replica: str
    nbytes: int
    scored_at: float | None = None
    batched_at: float | None = None
    for_depth: int | None = None


@dataclass(slots=True)
class Trained:
    """A batch that the line consumed."""

    for_depth: int
    at: float
    staleness: list[int]
    age_seconds: list[float]
    """Of each row: from the entry of the oldest version that sampled it to the batch."""
    tokens: int
    rows: int


@dataclass(slots=True)
class Lives:
    """A run's."""

    began_at: float = 0.0
    lives: dict[int, Life] = field(default_factory=dict)
    """By the sequence in TRAJECTORY."""
    batches: list[Trained] = field(default_factory=list)
    versions: list[VersionEntry] = field(default_factory=list)
    acks: list[Ack] = field(default_factory=list)
    admitted: list[float] = field(default_factory=list)
    """When each train sample was."""
    reissues: Counter[str] = field(default_factory=Counter)
    drops: Counter[str] = field(default_factory=Counter)
    """Samples by reason."""
    failures: Counter[str] = field(default_factory=Counter)
    failed_at: list[float] = field(default_factory=list)
    epochs: int = 0
    ended_at: float | None = None
    end_reason: str = ""


async def collect(bus: Bus, log: Log) -> Lives:
    """All of it; reads every stream once. The log has been read to its end."""
    found = Lives(began_at=log.entry(0).at)
    lineage = log.lineage
    found.versions = [log.version(number) for number in lineage.path() if number]
    found.epochs = sum(isinstance(entry, OpenEntry) for entry in log.entries())
    tasks, batches = await _control(bus, found)
    await _trajectories(bus, found, tasks)
    await _outcomes(bus, found)
    _batches(found, log, batches)
    with contextlib.suppress(MalformedError):
        found.acks = [decode_ack(value) for value in (await bus.kv(ACKS).items()).values()]
    return found


async def _control(bus: Bus, found: Lives) -> tuple[dict[int, float], list[BatchRecord]]:
    tasks: dict[int, float] = {}
    batches: list[BatchRecord] = []
    async with contextlib.aclosing(bus.read(CONTROL, follow=False)) as messages:
        async for message in messages:
            record = decode_control(message.data)
            match record:
                case TaskRecord(task=task) if task.lane == TRAIN:
                    tasks[message.sequence] = message.at
                    found.admitted.append(message.at)
                case ReissueRecord(task=task) if task.lane == TRAIN:
                    tasks[message.sequence] = message.at
                    found.reissues[record.reason] += 1
                case BatchRecord():
                    batches.append(record)
                case DropRecord(lane=lane) if lane == TRAIN:
                    found.drops[record.reason] += record.samples
                case EndRecord():
                    found.ended_at, found.end_reason = message.at, record.reason
    return tasks, batches


async def _trajectories(bus: Bus, found: Lives, tasks: dict[int, float]) -> None:
    async with contextlib.aclosing(bus.read(TRAJECTORY, follow=False)) as messages:
        async for message in messages:
            try:
                one = decode_trajectory(message.data)
            except MalformedError:
                continue  # it's the audit's to tell
            if one.lane != TRAIN:
                continue
            found.lives[message.sequence] = Life(
                task_at=tasks.get(one.task_sequence), attempt=one.attempt, pulled_at=one.timings.pulled_at,
                finished_at=one.timings.finished_at, queue_seconds=one.timings.queue_seconds,
                generate_seconds=one.timings.generate_seconds, durable_at=message.at, tokens=one.policy_tokens,
                version_start=one.version_start, replica=one.replica, nbytes=len(message.data),
            )  # fmt: skip


async def _outcomes(bus: Bus, found: Lives) -> None:
    async with contextlib.aclosing(bus.read(OUTCOME, follow=False)) as messages:
        async for message in messages:
            outcome = decode_outcome(message.data)
            if isinstance(outcome, Failure):
                found.failures[outcome.stage] += 1
                found.failed_at.append(message.at)
            elif isinstance(outcome, Score) and (life := found.lives.get(outcome.trajectory_sequence)) is not None:
                life.scored_at = message.at


def _batches(found: Lives, log: Log, records: list[BatchRecord]) -> None:
    """The last record of each depth that the line has consumed is the one that it trained on."""
    lineage = log.lineage
    depth = found.versions[-1].depth if found.versions else 0
    last = {record.for_depth: record for record in sorted(records, key=lambda record: record.epoch)}
    first_at = {lineage.depth(number): log.entry(number).at for number in reversed(lineage.path())}
    for for_depth, record in sorted(last.items()):
        if for_depth >= depth:
            continue
        ages = []
        for row in record.rows:
            if (life := found.lives.get(row.sequence)) is not None:
                life.batched_at, life.for_depth = record.at, for_depth
            at = first_at.get(row.least_depth)
            if at is not None:
                ages.append(record.at - at)
        found.batches.append(
            Trained(
                for_depth=for_depth, at=record.at, staleness=[for_depth - row.least_depth for row in record.within_bound],
                age_seconds=ages, tokens=sum(row.policy_tokens for row in record.rows), rows=len(record.rows),
            )
        )  # fmt: skip
