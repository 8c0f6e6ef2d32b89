"""The buffer's place in a run of its own: it feeds a trainer the planned batches, each once the version before it stands.

What it writes goes to the new run alone: the samples under their own group numbers, with tokens, logprobs and rewards as they
were, and with their version spans moved to the new run's versions, as stale as they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import msgspec

from towline.bundle.select import score_of
from towline.bundle.source import Source
from towline.bus.client import Bus
from towline.bus.control_log import ControlLog
from towline.bus.topology import CONTROL, TRAJECTORY
from towline.contract.codec import digest, encode
from towline.contract.control import BatchRecord, BatchRow, EndRecord, ForkRecord, OverStale, OverStaleRow
from towline.contract.entries import OpenEntry
from towline.contract.task import VersionSpan
from towline.contract.trajectory import Trajectory, decode_trajectory, encode_trajectory
from towline.errors import ConflictError, MalformedError, MissingError
from towline.replay.plan import FedBatch, Plan
from towline.store.lineage import Lineage
from towline.store.log import Log

POLL_SECONDS = 0.05
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
    """Chosen rows whose trajectory can't be had: they are in no batch."""
    _published: dict[tuple[int, int], BatchRow | None] = field(default_factory=dict)

    async def run(self) -> None:
        """Return once the last batch's version stands and the run's end is written."""
        pen = ControlLog(self.bus, "replay")
        async with contextlib.aclosing(self.bus.read(CONTROL, follow=False)) as messages:
            async for message in messages:
                pen.last_sequence = message.sequence
        await pen.take_over()
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
        known = [row for row in batch.rows if (row.group, row.sample) not in self._published]
        messages = await self.source.get_many(TRAJECTORY, [row.sequence for row in known])
        for row, message in zip(known, messages, strict=True):
            data = None if message is None else message.data
            self._published[row.group, row.sample] = await self._publish(row, data, batch.newest_depth, depth)
        rows = [self._published[row.group, row.sample] for row in batch.rows]
        self.missing_rows += sum(self._published[row.group, row.sample] is None for row in known)
        record = BatchRecord(
            writer=pen.stamp(), epoch=epoch, for_depth=depth, rows=tuple(row for row in rows if row is not None), at=time.time()
        )
        if isinstance(batch.over_stale, OverStale):
            tokens = {item.row: item.tokens for item in batch.over_stale.rows}
            left = [place for place, row in enumerate(rows) if row is not None]
            over = tuple(OverStaleRow(new, tokens[old]) for new, old in enumerate(left) if old in tokens)
            record = msgspec.structs.replace(record, over_stale=msgspec.structs.replace(batch.over_stale, rows=over))
        return record

    async def _publish(self, row: BatchRow, data: bytes | None, newest_depth: int, depth: int) -> BatchRow | None:
        """The sample in the new run: its row there, or None where its bytes can't be had."""
        if data is None or digest(data) != row.digest:
            return None
        try:
            found = decode_trajectory(data)
            moved = self._moved(found, newest_depth, depth)
        except (MalformedError, MissingError):
            return None
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
                score, run=topology.run, trajectory_sequence=created.sequence, trajectory_digest=digest(made),
                version_spans=moved.version_spans,
            )  # fmt: skip
            await self.scores.create(topology.score(row.group, row.sample), encode(again))
        lineage = self.log.lineage
        least = min(lineage.effective_depth(span.version) for span in moved.version_spans)
        return BatchRow(row.group, row.sample, created.sequence, digest(made), row.reward, least, row.policy_tokens)

    def _moved(self, trajectory: Trajectory, newest_depth: int, depth: int) -> Trajectory:
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
        return replace(trajectory, run=self.bus.topology.run, version_spans=spans)


def version_for(lineage: Lineage, depth: int) -> int:
    """The line's newest version of at most this depth; its first for a depth below 0."""
    numbers = [number for number in lineage.path() if lineage.depth(number) <= depth]
    return numbers[-1] if numbers else lineage.path()[0]


def most_stale(source: Source, plan: Plan) -> int:
    """The greatest staleness of a row, in depths."""
    return max((batch.newest_depth - row.least_depth for batch in plan.batches for row in batch.rows), default=0)
