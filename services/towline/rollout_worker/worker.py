"""A rollout worker: one engine that follows the run's policy and turns tasks into trajectories, one sample a slot."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import structlog

from towline.bus.client import Bus
from towline.config import Settings
from towline.engine.base import Engine, recovering
from towline.environment.base import Environment, environment_factory
from towline.errors import UnavailableError
from towline.replica.control import ControlFeed
from towline.replica.door import Door
from towline.replica.replica import Replica
from towline.rollout_worker.bench import Bench, WorkerFigures
from towline.rollout_worker.intake import Intake
from towline.rollout_worker.pace import Pace
from towline.rollout_worker.signal import Signal
from towline.runtime.run_end import run_has_ended
from towline.store.log import Log
from towline.store.objects import ObjectStore
from towline.verifiers.tokenizer import stored_tokenizer

HAND_OVER_SECONDS, LEAVE_SECONDS = 3.0, 1.0
"""Kept of the drain's time for giving back what isn't finished, and then for leaving the registry."""
_log = structlog.get_logger("towline.rollout_worker")


class Worker:
    """`run` serves until the run's end record (`ended`), until `drain`, or until something breaks, which it raises."""

    def __init__(self, *, name: str, settings: Settings, bus: Bus, objects: ObjectStore, engine: Engine, folder: Path) -> None:
        self._settings, self._bus, self._engine = settings, bus, engine
        self._feed = ControlFeed(bus)
        self._change = Signal()
        self.figures = WorkerFigures()
        self._pace = Pace(engine.slots, settings.rollout.queue_seconds)
        self.replica = Replica(
            name=name, bus=bus, objects=objects, log=Log(objects, settings.run.name), engine=engine, settings=settings,
            feed=self._feed, folder=folder, busy=lambda: self.busy,
        )  # fmt: skip
        self._door = Door(
            bus=bus, engine=engine, replica=self.replica, settings=settings.gateway, others=lambda: self._intake.busy,
            freed=lambda: self._intake.wake(),
        ) if settings.gateway.opens_doors else None  # fmt: skip
        door = self._door
        self._intake = Intake(
            Bench(
                bus=bus, settings=settings, engine=engine, replica=self.replica, feed=self._feed,
                environment=_environments(settings, objects), change=self._change, figures=self.figures,
                pace=self._pace, busy=lambda: self.busy,
                reserved=(lambda: door.taken) if door else lambda: 0, freed=door.let_in if door else lambda: None,
            )
        )  # fmt: skip
        self._feed.on_cancel = lambda sequence: self._intake.interrupt(sequence, "cancelled")
        self.replica.on_version = self.replica.on_news = self._on_change
        self._draining = asyncio.Event()

    @property
    def busy(self) -> int:
        return self._intake.busy + (self._door.busy if self._door is not None else 0)

    @property
    def not_ready(self) -> str | None:
        """Why no task can be served; None where one can."""
        states = self.replica.states
        if states.state == "draining":
            return "draining"
        if self.replica.version is None:
            return f"{states.state}: {states.detail}" if states.detail else states.state
        return recovering(self._engine) or None

    def drain(self) -> None:
        """Pull no more, finish or hand over what runs within service.drain_seconds, then let `run` return."""
        self._draining.set()

    async def run(self) -> Literal["ended", "drained"]:
        parts = [
            asyncio.create_task(part, name=name)
            for name, part in (
                ("feed", self._feed.run()), ("replica", self.replica.run()), ("intake", self._intake.run()),
                ("engine-watch", self._watch_engine()), *((("door", self._door.run()),) if self._door is not None else ()),
            )
        ]  # fmt: skip
        ended: asyncio.Task[Any]
        ended, _ = ends = [asyncio.create_task(self._until_ended()), asyncio.create_task(self._draining.wait())]
        try:
            done, _ = await asyncio.wait([*parts, *ends], return_when=asyncio.FIRST_COMPLETED)
            if self._door is not None:
                self._door.close()
            for part in parts:
                if part in done:
                    part.result()
            self._intake.close()
            self.replica.drain()
            if ended.done():
                ended.result()
                _log.info("run_ended", trajectories=self.figures.trajectories)
                self._intake.interrupt_all("ended")
                await self._intake.settled(HAND_OVER_SECONDS)
                return "ended"
            await self._intake.quiet(HAND_OVER_SECONDS)
            self._intake.hand_over_unbegun()
            seconds = self._settings.service.drain_seconds
            if not await self._intake.settled(max(seconds - HAND_OVER_SECONDS - LEAVE_SECONDS, 0.1)):
                self._intake.interrupt_all("drained")
                await self._intake.settled(HAND_OVER_SECONDS)
            return "drained"
        finally:
            if self._door is not None:
                await self._door.settled(LEAVE_SECONDS)
            await _cancelled(*parts, *ends)
            await self._engine.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self.replica.registry.leave()

    def report(self) -> dict[str, Any]:
        """The figures of the status; seconds and bytes are totals since the start."""
        replica, version, pace, partials = self.replica, self.replica.version, self._pace, self.figures.partials
        return {
            "version": version,
            "depth": None if version is None else replica.lineage.depth(version),
            "busy": self.busy,
            "slots": self._engine.slots,
            "limit": pace.limit,
            **replica.lag(),
            "queue_seconds_mean": pace.queue_seconds_mean,
            "tokens_per_second": pace.tokens_per_second,
            "trajectories": self.figures.trajectories,
            "tokens": self.figures.tokens,
            "superseded": self.figures.superseded,
            "cancelled": self.figures.cancelled,
            "handed_over": self.figures.handed_over,
            "failures": dict(self.figures.failures),
            "partials": {"written": partials.written, "failed": partials.failed, "resumed": partials.resumed},
            "tokens_resumed": partials.tokens_resumed,
            "partials_refused": dict(partials.refused),
            "activations": replica.figures.activations,
            "prepare_seconds": replica.figures.prepare_seconds,
            "pause_seconds": replica.figures.pause_seconds,
            "wire_bytes": replica.figures.wire_bytes,
            "requests": {} if self._door is None else self._door.report(),
            "failed_versions": {str(number): why for number, why in replica.figures.failed.items()},
        }

    def _on_change(self) -> None:
        self._change.notify()
        self._intake.review()
        if self._door is not None:
            self._door.review()

    async def _until_ended(self) -> None:
        """Until an `end` record stands after which the run didn't go on."""
        while True:
            await self._feed.end_noted.wait()
            self._feed.end_noted.clear()
            while True:
                try:
                    if await run_has_ended(self._bus, self._settings.run.steps):
                        return
                    break
                except UnavailableError as error:
                    _log.warning("run_end_unknown", reason=error.message)
                    await asyncio.sleep(1.0)

    async def _watch_engine(self) -> None:
        """An engine that died ends the worker: its supervisor starts a new one, and the tasks are delivered again."""
        told = ""
        while True:
            await asyncio.sleep(1.0)
            if self._engine.version is not None:
                self._engine.health()
            if (away := recovering(self._engine)) != told:
                self.replica.registry.renew()
                told = away


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks, and again until they end: a library may swallow a cancellation."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=1.0)
        await asyncio.gather(*done, return_exceptions=True)


def _environments(settings: Settings, objects: ObjectStore) -> Callable[[str], Awaitable[Environment]]:
    """Makes the environment of a name, which is imported once, with the tokenizer that it may need: off the event loop."""
    tokenizer = stored_tokenizer(objects, settings.run.name)
    factories: dict[str, Callable[[], Environment]] = {}

    def first(name: str) -> Environment:
        arguments = settings.prompts.environment_arguments if name == settings.prompts.environment else None
        factory = environment_factory(name, arguments, tokenizer)
        environment = factory()
        factories[name] = factory
        return environment

    async def make(name: str) -> Environment:
        return factories[name]() if name in factories else await asyncio.to_thread(first, name)

    return make
