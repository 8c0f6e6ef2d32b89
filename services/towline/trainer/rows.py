"""A batch record's rows, fetched by sequence from the bus; `towline.learner.rows` makes of them what a learner is given.

A row that can't be had, or isn't what the record says, is a named gap; a row that breaks the staleness bound stops the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import structlog

from towline.bus.client import Bus
from towline.bus.topology import TRAJECTORY
from towline.config import Settings
from towline.contract.control import BatchRecord, BatchRow
from towline.contract.trajectory import Trajectory
from towline.errors import CorruptError, InvariantError, MissingError
from towline.learner.advantages.base import Advantage
from towline.learner.rows import Bound, Gap, Gathered, assemble, open_row
from towline.trainer.watch import LogWatch

ROW_DEADLINE_SECONDS = 5.0
"""How long a row that the stream doesn't have (yet) is asked for."""
ELSEWHERE = "elsewhere"
"""Instead of the bytes of a row that is another rank's."""
IN_FLIGHT = 64
"""Rows asked for at a time."""
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.05, 1.0

log_line = structlog.get_logger(__name__)


class Gatherer:
    """Gathers batches for one learner."""

    def __init__(self, bus: Bus, watch: LogWatch, settings: Settings, advantage: Advantage, vocabulary: int) -> None:
        self._bus = bus
        self._watch = watch
        self._advantage = advantage
        self._vocabulary = vocabulary
        self._bound = Bound.of(settings)

    async def know(self, entries: int) -> None:
        """Have read so many of the LOG's entries at least."""
        if self._watch.log.next_number < entries:
            await self._watch.refresh()

    async def assemble(self, record: BatchRecord, payloads: Sequence[bytes | str]) -> Gathered:
        """The record's rows, of which `payloads` has the bytes or why there are none; ELSEWHERE is no gap of this rank's.

        `InvariantError` where a row is staler than the run allows.
        """
        opened = [open_row(row, payload) for row, payload in zip(record.rows, payloads, strict=True)]
        if not self._knows(opened):
            await self._watch.refresh()
        try:
            gathered = assemble(
                record, opened, advantage=self._advantage, vocabulary=self._vocabulary, lineage=self._watch.log.lineage,
                bound=self._bound,
            )  # fmt: skip
        except InvariantError:
            self._watch.check()  # a fork that has just come explains it
            raise
        gathered = replace(gathered, gaps=[gap for gap in gathered.gaps if gap.reason != ELSEWHERE])
        for gap in gathered.gaps:
            if gap.message:
                log_line.error("row can't be trained on", group=gap.row.group, sample=gap.row.sample, reason=gap.message)
        if gathered.masked_tokens or gathered.kept_tokens:
            log_line.info(
                "tokens over the bound", for_depth=record.for_depth, masked=gathered.masked_tokens, kept=gathered.kept_tokens,
                rows_all_masked=gathered.masked_rows,
            )  # fmt: skip
        if gathered.gaps:
            log_line.warning("rows are missing", for_depth=record.for_depth, of=len(record.rows), **gathered.missing)
        return gathered

    def _knows(self, opened: list[Trajectory | Gap]) -> bool:
        """Whether the LOG, as it was read last, has every version that the rows name."""
        named = {span.version for item in opened if isinstance(item, Trajectory) for span in item.version_spans}
        try:
            for version in named:
                self._watch.log.lineage.depth(version)
        except MissingError:
            return False
        return True

    async def payloads(self, rows: Sequence[BatchRow]) -> list[bytes | str]:
        """Each row's bytes, or why they can't be had by the deadline. The bus asks the leader where a peer hasn't the message.

        `UnavailableError` where the bus is away.
        """
        topology = self._bus.topology
        together = await self._bus.get_together(
            TRAJECTORY, [(topology.trajectory(row.group, row.sample), row.sequence) for row in rows]
        )
        gate = asyncio.Semaphore(IN_FLIGHT)
        deadline = time.monotonic() + ROW_DEADLINE_SECONDS

        async def payload(row: BatchRow) -> bytes | str:
            if (message := together.get(row.sequence)) is not None:
                return message.data
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
