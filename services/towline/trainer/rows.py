"""From a batch record to rows that a learner can train on: fetched by sequence, checked against the digest, decoded.

What the trainer computes on is byte for byte what the engine sampled. A row that can't be had, or isn't what the record says,
is a named drop; a row that breaks the staleness bound stops the run.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import structlog

from towline.bus.client import Bus
from towline.bus.topology import TRAJECTORY
from towline.config import Settings
from towline.contract.codec import digest
from towline.contract.control import BatchRecord, BatchRow
from towline.contract.trajectory import Trajectory, decode_trajectory
from towline.errors import CorruptError, InvariantError, MalformedError, MissingError
from towline.learner.advantages.base import Advantage, by_group
from towline.learner.base import Row, check_row
from towline.store.lineage import Lineage
from towline.trainer.watch import LogWatch

ROW_DEADLINE_SECONDS = 5.0
"""How long a row that the stream doesn't have (yet) is asked for."""
IN_FLIGHT = 64
"""Rows asked for at a time."""
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.05, 1.0

log_line = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Gathered:
    """A batch's rows as far as they could be had; `missing` counts the others by reason (lost, corrupt, digest, malformed)."""

    rows: list[Row]
    missing: dict[str, int]
    reward_mean: float

    @property
    def missing_rows(self) -> int:
        return sum(self.missing.values())


class Gatherer:
    """Gathers batches for one learner."""

    def __init__(self, bus: Bus, watch: LogWatch, settings: Settings, advantage: Advantage, vocabulary: int) -> None:
        self._bus = bus
        self._watch = watch
        self._advantage = advantage
        self._vocabulary = vocabulary
        self._max_staleness = settings.buffer.max_staleness
        self._keep_off_line = settings.buffer.off_line == "keep" and self._max_staleness > 0

    async def gather(self, record: BatchRecord) -> Gathered:
        """`InvariantError` where a row is staler than the run allows; `UnavailableError` where the bus is away."""
        payloads = await self._payloads(record.rows)
        rewards = np.array([row.reward for row in record.rows], np.float64)
        groups = np.array([row.group for row in record.rows], np.int64)
        # A missing row's reward still counts for its group: it is known, and the mean would be biased without it.
        advantages = by_group(self._advantage, groups, rewards)
        missing: Counter[str] = Counter()
        rows: list[Row] = []
        for row, payload, advantage in zip(record.rows, payloads, advantages, strict=True):
            if isinstance(payload, str):
                missing[payload] += 1
            elif digest(payload) != row.digest:
                missing["digest"] += 1
            else:
                try:
                    rows.append(await self._row(record, row, decode_trajectory(payload), float(advantage)))
                except MalformedError as error:
                    log_line.error("row can't be trained on", group=row.group, sample=row.sample, reason=error.message)
                    missing["malformed"] += 1
        if missing:
            log_line.warning("rows are missing", for_depth=record.for_depth, of=len(record.rows), **missing)
        return Gathered(rows, dict(missing), float(rewards.mean()) if rewards.size else 0.0)

    async def _payloads(self, rows: tuple[BatchRow, ...]) -> list[bytes | str]:
        """Each row's bytes, or why they can't be had by the deadline. The bus asks the leader where a peer hasn't the message."""
        gate = asyncio.Semaphore(IN_FLIGHT)
        deadline = time.monotonic() + ROW_DEADLINE_SECONDS

        async def payload(row: BatchRow) -> bytes | str:
            wait = FIRST_RETRY_SECONDS
            while True:
                try:
                    async with gate:
                        return (await self._bus.get(TRAJECTORY, row.sequence)).data
                except MissingError:
                    if time.monotonic() + wait > deadline:
                        return "lost"
                except CorruptError as error:
                    log_line.error("row can't be read", group=row.group, sample=row.sample, reason=error.message)
                    return "corrupt"
                await asyncio.sleep(wait)
                wait = min(2 * wait, LAST_RETRY_SECONDS)

        found = await asyncio.gather(*(payload(row) for row in rows), return_exceptions=True)
        for item in found:
            if isinstance(item, BaseException):
                raise item
        return [item for item in found if not isinstance(item, BaseException)]

    async def _row(self, record: BatchRecord, row: BatchRow, trajectory: Trajectory, advantage: float) -> Row:
        if (trajectory.group, trajectory.sample) != (row.group, row.sample):
            raise MalformedError(
                f"row {row.group}.{row.sample}: the trajectory is {trajectory.group}.{trajectory.sample}", code="identity"
            )
        least = await self._least_depth(trajectory)
        staleness = record.for_depth - least
        if staleness > self._max_staleness:
            self._watch.check()  # a fork that has just come explains it
            raise InvariantError(
                f"row {row.group}.{row.sample} of the batch for depth {record.for_depth} has the depth {least}: staleness "
                f"{staleness} is over {self._max_staleness}",
                code="staleness",
            )
        versions = np.full(trajectory.tokens.size, -1, np.int32)
        for span in trajectory.version_spans:
            versions[span.start : span.end] = span.version
        made = Row(
            group=row.group,
            sample=row.sample,
            tokens=trajectory.tokens,
            loss_mask=trajectory.loss_mask,
            logprobs=trajectory.logprobs,
            versions=versions,
            temperature=trajectory.sampling.temperature,
            advantage=advantage,
            staleness=staleness,
        )
        check_row(made, self._vocabulary)
        return made

    async def _least_depth(self, trajectory: Trajectory) -> int:
        """Over the row's versions, as the LOG has them."""
        known = {span.version for span in trajectory.version_spans}
        lineage = self._watch.log.lineage
        try:
            return min(self._depth(lineage, version) for version in known)
        except MissingError:
            await self._watch.refresh()
        try:
            return min(self._depth(lineage, version) for version in known)
        except MissingError as error:
            raise MalformedError(f"row {trajectory.group}.{trajectory.sample}: {error.message}", code="version") from error

    def _depth(self, lineage: Lineage, version: int) -> int:
        if not self._keep_off_line and not lineage.on_line(version):
            self._watch.check()
            raise InvariantError(f"version {version} is off the line, and buffer.off_line drops such samples", code="off_line")
        return lineage.effective_depth(version)
