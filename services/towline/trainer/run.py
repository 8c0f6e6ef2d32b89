"""A trainer from its start to its end, without the service around it: entry 0, `open`, the loop."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from towline.bus.client import Bus
from towline.bus.topology import CONTROL
from towline.config import Settings
from towline.contract.codec import encode
from towline.contract.entries import BaseEntry, OpenEntry, Probe
from towline.contract.policy import Opened
from towline.errors import InvariantError, UnavailableError, UsageError
from towline.learner import fingerprint
from towline.learner.advantages.base import Advantage
from towline.learner.registry import ADVANTAGES, look_up
from towline.runtime.halves import check_store_as_new
from towline.runtime.run_end import run_has_ended
from towline.store.log import Log
from towline.store.objects import ObjectStore
from towline.trainer.crew import Crew
from towline.trainer.feed import Feed
from towline.trainer.figures import Figures
from towline.trainer.opening import Opening, open_epoch, seed
from towline.trainer.rows import Gatherer
from towline.trainer.staging import Stager
from towline.trainer.training import Training
from towline.trainer.watch import LogWatch

POLL_SECONDS = 0.5
"""How often the LOG is read where no hint comes."""

Tell = Callable[[str | None], None]
log_line = structlog.get_logger(__name__)


async def run_trainer(
    settings: Settings,
    bus: Bus,
    objects: ObjectStore,
    *,
    replica: str,
    figures: Figures,
    draining: asyncio.Event,
    tell: Tell,
    crew: Crew | None = None,
) -> None:
    """Return when the run has ended, its last version committed, or when drained. The lease is the caller's.

    `crew`: the ranks, already begun where there are several; this process alone where it's left out.
    `tell` hears the named state that the trainer isn't ready in, or None. `FencedError` where another trainer took over, where
    the head was quarantined; `UsageError`, `InvariantError` and `UnavailableError` as the parts raise them.
    """
    if settings.sampling.temperature <= 0:
        raise UsageError("sampling.temperature = 0: greedy samples can't be trained on; use 1.0", code="temperature")
    log = Log(objects, settings.run.name)
    await check_store_as_new(bus, log)
    if crew is None:
        crew = Crew(settings, objects)
        crew.begin()
    advantage: Advantage = look_up("trainer.advantage", ADVANTAGES, settings.trainer.advantage)
    tell("seeding")
    await asyncio.to_thread(seed, objects, log, settings)
    if await _is_over(settings, bus, log):
        log_line.info("nothing is left to train", depth=log.lineage.depth(log.lineage.latest))
        figures.depth = log.lineage.depth(log.lineage.latest)
        return
    tell("ranks")
    await asyncio.to_thread(crew.wait)
    tell("opening")
    opened_at = await _control_end(bus, log)
    scratch = _scratch(settings, replica)
    opening = await asyncio.to_thread(_open, settings, objects, log, crew, scratch)
    entry = opening.entry
    figures.depth, figures.epoch, figures.step = entry.depth, entry.number, crew.learner.step
    log_line.info("opened", epoch=entry.number, base=entry.base, depth=entry.depth, checkpoint=entry.checkpoint)
    try:
        await bus.publish(bus.topology.policy("opened"), encode(Opened(epoch=entry.number)))
    except UnavailableError as error:  # a hint: whoever misses it polls the LOG
        log_line.warning("opened can't be told", reason=error.message)
    tell(None)
    await _training(settings, bus, objects, log, entry, crew, advantage, opened_at, figures, draining, tell).run()
    if not draining.is_set():
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)


def _training(
    settings: Settings,
    bus: Bus,
    objects: ObjectStore,
    log: Log,
    entry: OpenEntry,
    crew: Crew,
    advantage: Advantage,
    opened_at: int,
    figures: Figures,
    draining: asyncio.Event,
    tell: Tell,
) -> Training:
    watch = LogWatch(log, bus, POLL_SECONDS)
    watch.epoch = entry.number
    return Training(
        settings,
        crew,
        depth=entry.depth,
        cursor=entry.batch_cursor,
        probe=_probe(log),
        feed=Feed(bus, entry.number, entry.depth, entry.batch_cursor, opened_at),
        gatherer=Gatherer(bus, watch, settings, advantage, crew.learner.vocabulary),
        stager=Stager(bus, objects, watch, crew, epoch=entry.number, head=entry.base),
        watch=watch,
        figures=figures,
        draining=draining,
        tell=tell,
    )


async def _is_over(settings: Settings, bus: Bus, log: Log) -> bool:
    """Whether the line has every step, or the run's end stands: then no epoch is opened."""
    await asyncio.to_thread(log.refresh)
    lineage = log.lineage
    return lineage.depth(lineage.latest) >= settings.run.steps or await run_has_ended(bus, settings.run.steps)


async def _control_end(bus: Bus, log: Log) -> int:
    """CONTROL's last sequence. `InvariantError` where the stream lost batches that are trained already."""
    state = await bus.stream_state(CONTROL)
    trained = max((getattr(entry, "batch_cursor", 0) for entry in log.entries()), default=0)
    if state.last_sequence < trained:
        raise InvariantError(
            f"CONTROL ends at {state.last_sequence}, before the batch at {trained} that is trained already: the stream was lost",
            code="stream_regressed",
        )
    return state.last_sequence


def _open(settings: Settings, objects: ObjectStore, log: Log, crew: Crew, folder: Path) -> Opening:
    began = time.monotonic()
    crew.make(log, folder)
    opening = open_epoch(log, crew)
    # Before the epoch's first version: a replay needs to know what its bits depend on.
    found = fingerprint.of_settings(settings, opening.entry.number, opening.layout_digest)
    fingerprint.record(objects, log.run, found)
    log_line.info("learner ready", seconds=round(time.monotonic() - began, 3))
    return opening


def _probe(log: Log) -> Probe | None:
    base = log.entry(0)
    return base.probe if isinstance(base, BaseEntry) else None


def _scratch(settings: Settings, replica: str) -> Path:
    """A folder of this replica's own for the base model; the next start finds it again, whatever killed this one."""
    name = hashlib.sha256(f"{settings.store.url} {settings.run.name} {replica}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"towline-trainer-{name}")
