"""The trainer's loop: the next batch, a step, a version on its way, until the run ends, is drained, or another took over.

In async mode the next step runs while the last version is encoded, uploaded and committed, and steps that finish meanwhile
coalesce into the next version; in sync mode each version stands before the next step begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from towline import faults, spans
from towline.config import Settings
from towline.contract.control import EndRecord
from towline.contract.entries import Probe
from towline.errors import InvariantError, UnavailableError
from towline.learner.base import StepReport
from towline.learner.rows import Gathered
from towline.spans import Context
from towline.store.versions import VersionFacts
from towline.trainer.crew import RANK_LOST, Crew
from towline.trainer.feed import BatchAt, Feed
from towline.trainer.figures import Figures
from towline.trainer.rows import Gatherer
from towline.trainer.staging import PATIENCE_SECONDS, Committed, Snapshot, Stager
from towline.trainer.watch import LogWatch, cancel

DRAIN_MARGIN_SECONDS = 1.0
"""Left of drain_seconds for what comes after the loop."""

GATHER_RETRY_SECONDS = 1.0

log_line = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """A batch with its rows at hand."""

    batch: BatchAt
    gathered: Gathered


@dataclass(slots=True)
class Unstaged:
    """What was consumed since the last snapshot."""

    batches: int = 0
    skipped: list[int] = field(default_factory=list)
    missing_rows: int = 0
    skip_reasons: Counter[str] = field(default_factory=Counter)
    steps: list[Context] = field(default_factory=list)
    """The spans of the batches' steps, where those are traced."""


class Training:
    """One epoch's loop. `tell` is given the named state that the loop waits in, or None while it works."""

    def __init__(
        self,
        settings: Settings,
        crew: Crew,
        *,
        depth: int,
        cursor: int,
        probe: Probe | None,
        feed: Feed,
        gatherer: Gatherer,
        stager: Stager,
        watch: LogWatch,
        figures: Figures,
        draining: asyncio.Event,
        tell: Callable[[str | None], None],
    ) -> None:
        mode = settings.trainer.mode
        self._sync = mode == "sync" or (mode == "auto" and settings.buffer.max_staleness == 0)
        self._steps = settings.run.steps
        self._checkpoint_every = settings.trainer.checkpoint_every
        self._drain_seconds = max(settings.service.drain_seconds - DRAIN_MARGIN_SECONDS, DRAIN_MARGIN_SECONDS)
        self._crew = crew
        self._depth = depth
        self._cursor = cursor
        self._probe = probe
        self._feed = feed
        self._gatherer = gatherer
        self._stager = stager
        self._watch = watch
        self._figures = figures
        self._draining = draining
        self._tell = tell
        self._unstaged = Unstaged()
        self._since_checkpoint = 0
        self._ended = False

    async def run(self) -> None:
        """Return once the run has ended and its last version stands, or once it's drained. `FencedError` as in `LogWatch`."""
        works = self._works()
        watching: asyncio.Task[Any] = asyncio.create_task(self._watch.run(), name="trainer-log")
        draining: asyncio.Task[Any] = asyncio.create_task(self._draining.wait(), name="trainer-drain")
        coming: asyncio.Task[Work | EndRecord] = asyncio.create_task(anext(works), name="trainer-batch")
        staging: asyncio.Task[Committed] | None = None
        drain_until: float | None = None
        try:
            while True:
                self._crew.check()
                if watching.done():
                    watching.result()
                if staging is not None and staging.done():
                    self._take_commit(staging.result())
                    staging = None
                if draining.done() and drain_until is None:
                    drain_until = time.monotonic() + self._drain_seconds
                if staging is None and self._unstaged.batches:
                    snapshot = await asyncio.to_thread(self._snapshot)
                    staging = asyncio.create_task(self._stager.stage(snapshot), name="trainer-stage")
                finished = self._ended or self._depth >= self._steps
                if staging is None and (finished or drain_until is not None):
                    return
                if drain_until is not None and time.monotonic() > drain_until:
                    log_line.warning("drained before the version was committed", depth=self._depth)
                    return
                may_train = not finished and drain_until is None and not (self._sync and staging is not None)
                if not (may_train and coming.done()):
                    waits = {watching, coming} if may_train else {watching}
                    waits |= {draining} if drain_until is None else set()
                    waits |= {staging} if staging is not None else set()
                    await self._idle(waits, drain_until)
                    continue
                work = coming.result()
                if isinstance(work, EndRecord):
                    log_line.info("the run has ended", reason=work.reason, depth=work.depth)
                    self._ended = True
                    continue
                coming = asyncio.create_task(anext(works), name="trainer-batch")
                await self._step(work)
        finally:
            await cancel(*(task for task in (watching, draining, coming, staging) if task is not None))
            with contextlib.suppress(RuntimeError):  # a generator that was cancelled in mid-step is closed already
                await works.aclose()

    async def _works(self) -> AsyncGenerator[Work | EndRecord, None]:
        """Batches with their rows, one ahead of the step: fetching goes on while the learner computes."""
        async with contextlib.aclosing(self._feed.batches()) as items:
            async for item in items:
                if isinstance(item, EndRecord):
                    yield item
                    return
                with spans.follow("train.gather", item.headers):
                    gathered = await self._gather(item)
                yield Work(item, gathered)
        raise InvariantError("CONTROL can't be followed any more", code="feed")

    async def _gather(self, batch: BatchAt) -> Gathered:
        """Again while the bus is away: a row is missing only where the bus says so."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return await self._crew.gather(self._gatherer, batch.record, self._watch.log.next_number)
            except UnavailableError as error:
                if error.code == RANK_LOST or time.monotonic() > give_up:
                    raise
                log_line.warning("rows can't be fetched", for_depth=batch.record.for_depth, reason=error.message)
                await asyncio.sleep(GATHER_RETRY_SECONDS)

    async def _idle(self, waits: set[asyncio.Task[Any]], drain_until: float | None) -> None:
        """Wait for the first of them; what passes is idle time."""
        since = time.monotonic()
        timeout = 1.0 if drain_until is None else max(min(1.0, drain_until - since), 0.0)
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        self._figures.idle_seconds += time.monotonic() - since
        if not self._draining.is_set():
            self._tell(self._stager.trouble)

    async def _step(self, work: Work) -> None:
        record, gathered = work.batch.record, work.gathered
        if record.for_depth != self._depth:
            raise InvariantError(f"a batch for depth {record.for_depth} at depth {self._depth}", code="batch_order")
        faults.point("trainer.batch")
        begun = time.monotonic()
        with spans.follow("train.step", work.batch.headers) as span:
            report: StepReport = await asyncio.to_thread(self._crew.train, record.for_depth)
            if span:
                span.set(
                    for_depth=record.for_depth, rows=report.rows, tokens=report.tokens, loss=report.loss,
                    reward_mean=gathered.reward_mean, missing_rows=gathered.missing_rows, trained=report.trained,
                )  # fmt: skip
        seconds = time.monotonic() - begun
        if span.context is not None:
            self._unstaged.steps.append(span.context)
        faults.point("trainer.trained")
        self._depth += 1
        self._cursor = work.batch.sequence
        self._unstaged.batches += 1
        self._unstaged.missing_rows += gathered.missing_rows
        self._unstaged.skip_reasons.update(report.skip_reasons)
        if not report.trained:
            self._unstaged.skipped.append(record.for_depth)
        self._figures.trained(
            report,
            step=self._crew.learner.step,
            reward_mean=gathered.reward_mean,
            missing_rows=gathered.missing_rows,
            seconds=seconds,
        )
        level = log_line.warning if report.skipped else log_line.info
        level(
            "trained", depth=self._depth, reward_mean=round(gathered.reward_mean, 4), loss=round(report.loss, 6),
            rows=report.rows, skipped=report.skipped, seconds=round(seconds, 3), mismatch_kl=report.mismatch_kl,
        )  # fmt: skip

    def _snapshot(self) -> Snapshot:
        """The policy now, and what was consumed for it. Between steps: nothing else touches the learner meanwhile."""
        last = self._ended or self._draining.is_set() or self._depth >= self._steps
        due = last or self._since_checkpoint + 1 >= self._checkpoint_every
        unstaged, self._unstaged = self._unstaged, Unstaged()
        found = self._crew.snapshot(due, () if self._probe is None else self._probe.tokens)
        self._figures.snapshot_seconds += found.seconds
        probe = None
        if self._probe is not None:
            probe = Probe(tokens=self._probe.tokens, logprobs=found.logprobs, tolerance=self._probe.tolerance)
        facts = VersionFacts(
            depth=self._depth,
            skipped=tuple(unstaged.skipped),
            step=self._crew.learner.step,
            batch_cursor=self._cursor,
            checkpoint=None,
            missing_rows=unstaged.missing_rows,
            probe=probe,
            skip_reasons=dict(unstaged.skip_reasons),
        )
        return Snapshot(facts=facts, checkpoint=due, steps=tuple(unstaged.steps))

    def _take_commit(self, committed: Committed) -> None:
        entry = committed.entry
        self._since_checkpoint = 0 if entry.checkpoint is not None else self._since_checkpoint + 1
        self._figures.committed(entry, committed.staged_seconds)
        log_line.info(
            "committed", version=entry.number, depth=entry.depth, density=round(entry.density, 5), wire_bytes=entry.wire_bytes,
            checkpoint=entry.checkpoint, seconds=round(committed.staged_seconds, 3),
        )  # fmt: skip
