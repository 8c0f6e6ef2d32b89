"""The buffer's place in a run of its own: it feeds a trainer the planned batches, each once the version before it stands.

What it writes goes to the new run alone: the samples under their own group numbers, with tokens, logprobs and rewards as they
were, and with their version spans moved to the new run's versions, as stale as they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from towline.bundle.select import score_of
from towline.bundle.source import Source
from towline.bus.client import Bus
from towline.bus.control_log import ControlLog
from towline.bus.topology import CONTROL, TRAJECTORY
from towline.contract.codec import digest, encode
from towline.contract.control import AdmitRecord, BatchRecord, BatchRow, EndRecord, ForkRecord, TaskRecord, decode_control
from towline.contract.entries import OpenEntry
from towline.contract.groups import EXTERNAL, is_external
from towline.contract.task import Task, VersionSpan
from towline.contract.trajectory import Trajectory, decode_trajectory, encode_trajectory
from towline.errors import ConflictError, MalformedError, MissingError
from towline.replay.plan import FedBatch, Plan
from towline.store.lineage import Lineage
from towline.store.log import Log

POLL_SECONDS = 0.05
LOST = 1 << 52
"""In the place of a sequence of TRAJECTORY: nothing stands there, so the trainer takes the row for missing, as it is."""
STEPS, END_OF_DATA = "steps", "end_of_data"
Wait = Callable[[int], Awaitable[None]]
"""Holds a batch up (its place in the plan) until somebody lets it go."""


@dataclass(slots=True)
class Feeder:
    """`run` to the end of the plan. The buses and `log` are the new run's."""

    source: Source
    plan: Plan
    bus: Bus
    """As the buffer: it writes CONTROL."""
    samples: Bus
    """As a worker: it publishes trajectories."""
    scores: Bus
    """As the reward service."""
    log: Log
    steps: int
    """The new run's run.steps."""
    speed: float = 0.0
    """Times the recorded pace; 0: as fast as it goes."""
    wait: Wait | None = None
    fed: int = 0
    """Batches, forks' repeats not counted."""
    missing_rows: int = 0
    """Rows whose trajectory can't be had: the trainer finds them missing, and their rewards still count for their groups."""
    _published: dict[tuple[int, int], BatchRow] = field(default_factory=dict)
    _tasks: dict[tuple[int, int], Task] = field(default_factory=dict)
    """Of the source, what is to be admitted."""

    async def run(self) -> None:
        """Return once the last batch's version stands and the run's end is written."""
        pen = ControlLog(self.bus, "replay")
        async with contextlib.aclosing(self.bus.read(CONTROL, follow=False)) as messages:
            async for message in messages:
                pen.last_sequence = message.sequence
        await pen.take_over()
        await self._read_tasks()
        topology = self.bus.topology
        epoch, depth = -1, 0
        began: tuple[float, float] | None = None
        while True:
            await asyncio.to_thread(self.log.refresh)
            lineage = self.log.lineage
            newest = lineage.newest_epoch
            if newest is not None and newest != epoch:
                opened = self.log.entry(newest)
                assert isinstance(opened, OpenEntry)
                epoch, depth = newest, opened.depth
                fork = ForkRecord(writer=pen.stamp(), epoch=epoch, base=opened.base, depth=depth)
                await pen.append([(topology.control("fork"), encode(fork))])
            standing = lineage.depth(lineage.latest)
            if epoch >= 0 and standing == depth:
                if depth >= len(self.plan.batches):
                    break
                batch = self.plan.batches[depth]
                if depth >= self.fed:  # not again after a restart of the trainer
                    began = began or (time.monotonic(), batch.at)
                    await self._due(batch, depth, began)
                record = await self._record(batch, epoch, depth, pen)
                await pen.append([(topology.control("batch"), encode(record))])
                depth += 1
                self.fed = max(self.fed, depth)
            await asyncio.sleep(POLL_SECONDS)
        reason = STEPS if depth >= self.steps else END_OF_DATA
        await pen.append([(topology.control("end"), encode(EndRecord(writer=pen.stamp(), reason=reason, depth=depth)))])

    async def _due(self, batch: FedBatch, place: int, began: tuple[float, float]) -> None:
        if self.speed > 0:
            due = began[0] + (batch.at - began[1]) / self.speed
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
        if self.wait is not None:
            await self.wait(place)

    async def _record(self, batch: FedBatch, epoch: int, depth: int, pen: ControlLog) -> BatchRecord:
        """The batch for this depth of the new run, its rows published first."""
        new = [row for row in batch.rows if (row.group, row.sample) not in self._published]
        messages = await self.source.get_many(TRAJECTORY, [row.sequence for row in new])
        admitted = await self._admit(new, pen)
        for row, message, task_sequence in zip(new, messages, admitted, strict=True):
            data = None if message is None else message.data
            made = await self._publish(row, data, batch.newest_depth, depth, task_sequence)
            self._published[row.group, row.sample] = made
            self.missing_rows += made.sequence == LOST
        rows = tuple(self._published[row.group, row.sample] for row in batch.rows)
        return BatchRecord(
            writer=pen.stamp(), epoch=epoch, for_depth=depth, rows=rows, at=time.time(), over_stale=batch.over_stale
        )

    async def _read_tasks(self) -> None:
        """Of the planned samples: a task is their admission in the new run, too."""
        wanted = {(row.group, row.sample) for row in self.plan.rows}
        subject = self.source.topology.subject("control.task.>")
        async with contextlib.aclosing(self.source.read(CONTROL, subjects=[subject])) as messages:
            async for message in messages:
                record = decode_control(message.data)
                if isinstance(record, TaskRecord) and (record.task.group, record.task.sample) in wanted:
                    self._tasks[record.task.group, record.task.sample] = record.task

    async def _admit(self, rows: Sequence[BatchRow], pen: ControlLog) -> list[int]:
        """Each row's task sequence in the new run; 0 for a sample from outside, or whose task isn't in CONTROL any more."""
        topology = self.bus.topology
        sizes = Counter(row.group for row in rows)
        sequences = [0] * len(rows)
        places, records = [], []
        for place, row in enumerate(rows):
            task = self._tasks.get((row.group, row.sample))
            if task is not None:
                own = msgspec.structs.replace(task, run=topology.run)
                places.append(place)
                records.append((topology.task(task.lane), encode(TaskRecord(writer=pen.stamp(), task=own))))
            elif is_external(row.group):
                admit = AdmitRecord(
                    writer=pen.stamp(), lane=EXTERNAL, group=row.group, sample=row.sample, group_size=sizes[row.group]
                )
                places.append(place)
                records.append((topology.control("admit"), encode(admit)))
        if records:
            for place, sequence in zip(places, await pen.append(records), strict=True):
                sequences[place] = 0 if is_external(rows[place].group) else sequence
        return sequences

    async def _publish(self, row: BatchRow, data: bytes | None, newest_depth: int, depth: int, task_sequence: int) -> BatchRow:
        """The sample in the new run: its row there."""
        lost = msgspec.structs.replace(row, sequence=LOST, least_depth=max(depth - (newest_depth - row.least_depth), 0))
        if data is None or digest(data) != row.digest:
            return lost
        try:
            moved = self._moved(decode_trajectory(data), newest_depth, depth, task_sequence)
        except (MalformedError, MissingError):
            return lost
        topology = self.bus.topology
        made = encode_trajectory(moved)
        created = await self.samples.create(topology.trajectory(row.group, row.sample), made)
        if not created.won:
            raise ConflictError(
                f"run {topology.run} has another trajectory {row.group}.{row.sample} already; give another --name",
                code="run_exists",
            )
        score = await score_of(self.source, row.group, row.sample)
        if score is not None:
            again = msgspec.structs.replace(
                score, run=topology.run, task_sequence=task_sequence, trajectory_sequence=created.sequence,
                trajectory_digest=digest(made), version_spans=moved.version_spans,
            )  # fmt: skip
            await self.scores.create(topology.score(row.group, row.sample), encode(again))
        lineage = self.log.lineage
        least = min(lineage.effective_depth(span.version) for span in moved.version_spans)
        return BatchRow(row.group, row.sample, created.sequence, digest(made), row.reward, least, row.policy_tokens)

    def _moved(self, trajectory: Trajectory, newest_depth: int, depth: int, task_sequence: int) -> Trajectory:
        """Each span at the new run's version that is as many depths behind `depth` as its own was behind the recorded batch."""
        there, here = self.source.log.lineage, self.log.lineage
        spans = tuple(
            VersionSpan(
                span.start,
                span.end,
                version_for(here, depth - max(newest_depth - there.effective_depth(span.version), 0)),
                span.cut,
            )
            for span in trajectory.version_spans
        )
        return replace(trajectory, run=self.bus.topology.run, task_sequence=task_sequence, version_spans=spans)


def version_for(lineage: Lineage, depth: int) -> int:
    """The line's newest version of at most this depth; its first for a depth below 0."""
    numbers = [number for number in lineage.path() if lineage.depth(number) <= depth]
    return numbers[-1] if numbers else lineage.path()[0]


def most_stale(source: Source, plan: Plan) -> int:
    """The greatest staleness of a row, in depths."""
    return max((batch.newest_depth - row.least_depth for batch in plan.batches for row in batch.rows), default=0)
