"""A sample's PARTIAL: found by whoever gets its task next, written while it runs and when its worker is told to stop.

Writing never holds up a sample: what can't be written in time is left out, and counted. Nothing stands in a PARTIAL that was
sampled from a version which the engine hadn't proved.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np
import structlog

from towline.bus.client import Bus, Delivery
from towline.bus.topology import PARTIAL
from towline.contract.partial import Partial, decode_partial, encode_partial, prompt_digest
from towline.contract.task import TRAIN, Task
from towline.errors import MalformedError, TowlineError
from towline.replica.replica import Replica
from towline.rollout_worker.dead import dead_letter
from towline.rollout_worker.eligibility import stale
from towline.rollout_worker.episode import Episode
from towline.rollout_worker.record import Record

WRITE_SECONDS, HAND_OVER_SECONDS = 5.0, 1.5
"""How long writing may take; what is handed over has to fit into the drain's last seconds."""
_log = structlog.get_logger("towline.rollout_worker")


@dataclass(slots=True)
class PartialFigures:
    """Totals since the start."""

    written: int = 0
    failed: int = 0
    resumed: int = 0
    tokens_resumed: int = 0
    """Policy tokens that other attempts had generated, and that weren't generated again."""
    refused: dict[str, int] = field(default_factory=dict)
    """Those found that weren't gone on from, by why: malformed, foreign, unknown, moved, stale, off_line, environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who writes."""

    bus: Bus
    replica: Replica
    engine: str
    figures: PartialFigures


class Partials:
    """The PARTIAL of one delivery's sample."""

    def __init__(self, origin: Origin, delivery: Delivery, task: Task) -> None:
        self._origin, self._delivery, self._task = origin, delivery, task
        self._subject = origin.bus.topology.partial(task.group, task.sample)
        self.found: Partial | None = None
        self.starts = 0
        """How often the task was begun without an outcome or a further PARTIAL, as far as is known."""
        self._standing = False
        """Whether the subject may hold something of this sample."""
        self._held_tokens = 0
        self._news = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """Read what earlier deliveries left. A message that isn't a PARTIAL goes to the dead letters."""
        origin, delivery = self._origin, self._delivery
        self.starts = 1 if delivery.num_delivered > 1 else 0
        message = await origin.bus.last(PARTIAL, self._subject)
        if message is None:
            return
        self._standing = True
        try:
            partial = decode_partial(message.data)
        except MalformedError as error:
            _log.error("partial_unreadable", group=self._task.group, sample=self._task.sample, reason=error.message)
            self.refuse("malformed")
            await dead_letter(origin.bus, "partial", message, error.message)
            return
        if not partial.is_of(self._task):
            self.refuse("foreign")
            return
        if partial.task_sequence == delivery.sequence and delivery.num_delivered > 1:
            self.starts = partial.starts
        if partial.policy_tokens:
            self.found, self._held_tokens = partial, partial.policy_tokens

    def unknown(self) -> bool:
        """Whether it names a version that this worker's view of the LOG doesn't hold yet."""
        lineage = self._origin.replica.lineage
        return self.found is not None and any(version not in lineage for version in _versions(self.found))

    def usable(self, max_staleness: int, *, keep_off_line: bool, keep_stale: bool = False) -> Partial | None:
        """What can be gone on from by the LOG as it is now; what can't is forgotten. `keep_stale`: the buffer takes tokens over
        the bound, too."""
        partial, task, lineage = self.found, self._task, self._origin.replica.lineage
        if partial is None:
            return None
        versions, why = _versions(partial), None
        if self.unknown():
            why = "unknown"
        elif task.exact_version is not None and versions != {task.exact_version}:
            why = "moved"
        elif task.lane == TRAIN and not keep_stale and stale(lineage, min(versions, key=lineage.effective_depth), max_staleness):
            why = "stale"
        elif task.lane == TRAIN and not (keep_off_line and max_staleness) and not all(map(lineage.on_line, versions)):
            why = "off_line"
        if why is not None:
            self.forget(why)
        return self.found

    def forget(self, why: str) -> None:
        """Don't go on from what was found."""
        self.refuse(why)
        self.found, self._held_tokens = None, 0

    def refuse(self, why: str) -> None:
        refused = self._origin.figures.refused
        refused[why] = refused.get(why, 0) + 1

    async def begin(self) -> None:
        """Before a task that was begun before is begun again: say so, since a task that kills its worker leaves no record."""
        self.starts += 1
        if self._delivery.num_delivered > 1:
            await self._write(*self._before, self.starts)

    def keep(self, episode: Episode) -> None:
        """The episode has more than before: write it down soon."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(episode), name="partial-keeper")
        self._news.set()

    async def stop(self) -> None:
        """Write no more."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None

    async def hand_over(self, episode: Episode | None) -> None:
        """The last word of a delivery that ends in good order: all there is, and that the task isn't to blame."""
        await self.stop()
        if episode is not None and (record := episode.so_far()).policy_tokens:
            await self._write(record, episode.environment_state, 0, seconds=HAND_OVER_SECONDS)
        elif self._standing:
            await self._write(*self._before, self.starts - (episode is not None), seconds=HAND_OVER_SECONDS)

    async def clear(self) -> None:
        """The sample has its outcome: leave no more than a few bytes of it."""
        await self.stop()
        if self._standing:
            await self._write(Record(), None, 0)

    async def _keep(self, episode: Episode) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            record = episode.so_far()
            if record.policy_tokens > self._held_tokens:
                # This delivery may yet be the end of its worker, so it counts as begun again.
                await self._write(record, episode.environment_state, 1)

    @property
    def _before(self) -> tuple[Record, bytes | None]:
        """What stood before this delivery."""
        return (Record(), None) if self.found is None else (Record.of(self.found), self.found.environment_state)

    async def _write(self, record: Record, state: bytes | None, starts: int, *, seconds: float = WRITE_SECONDS) -> None:
        """As far as it can be done in time."""
        origin, task = self._origin, self._task
        try:
            async with asyncio.timeout(seconds):
                if not await origin.replica.vouched(record.sampled_here):
                    return
                data = encode_partial(self._partial(record, state, starts))
                self._standing = True
                await origin.bus.publish(self._subject, data)
        except (TimeoutError, TowlineError) as error:
            origin.figures.failed += 1
            _log.warning("partial_left_out", group=task.group, sample=task.sample, reason=str(error) or "out of time")
            return
        self._held_tokens = record.policy_tokens
        self.starts = starts
        origin.figures.written += 1

    def _partial(self, record: Record, state: bytes | None, starts: int) -> Partial:
        task, origin, delivery = self._task, self._origin, self._delivery
        return Partial(
            run=task.run, group=task.group, sample=task.sample, task_sequence=delivery.sequence, delivery=delivery.num_delivered,
            starts=starts, prompt_digest=prompt_digest(task), environment=task.environment, sampling=task.sampling,
            seed=task.seed, tokens=np.array(record.tokens, np.int32), logprobs=record.all_logprobs,
            version_spans=tuple(record.spans), segments=tuple(record.segments), turn=record.turn, environment_state=state,
            engine=origin.engine, replica=origin.replica.name, at=time.time(), queue_seconds=record.queue_seconds,
            generate_seconds=record.generate_seconds,
        )  # fmt: skip


def _versions(partial: Partial) -> set[int]:
    return {span.version for span in partial.version_spans}
