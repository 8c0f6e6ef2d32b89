"""Keeps an engine on the run's policy: follows the LOG, prepares, activates, proves and acknowledges versions.

Preparing never pauses generation. A version is advertised once the engine has proved it: its live weights have the
entry's digest and its logprobs on the probe's tokens are those that the trainer saw. What was sampled from a version that
failed this isn't vouched for, and the replica goes back to the last good one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import structlog

from towline import faults
from towline.bus.client import Bus
from towline.config import Settings
from towline.contract.policy import Ack
from towline.engine.base import Activation, Engine
from towline.errors import CorruptError, EngineError, MissingError, TowlineError, UnavailableError
from towline.replica.control import ControlFeed
from towline.replica.prepare import Copy, Prepared, base_copy, prepare
from towline.replica.registry import Registry
from towline.replica.states import StateMachine
from towline.replica.target import EvalHolds, choose
from towline.store.lineage import Lineage
from towline.store.log import Log
from towline.store.objects import ObjectStore

T = TypeVar("T")
Mode = Literal["initial", "drain", "in_place", "retract"]
PREPARE_TRIES = 5
"""Corrupt downloads of one version before it counts as failed here."""
_FIRST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.2, 10.0
_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class ReplicaFigures:
    """Totals since the start; seconds and bytes."""

    activations: int = 0
    prepare_seconds: float = 0.0
    pause_seconds: float = 0.0
    wire_bytes: int = 0
    failed: dict[int, str] = field(default_factory=dict)


class Replica:
    """One engine's place in the fleet.

    `version` is what it advertises; `on_version` is called when that changes, and `on_news` when the LOG has grown. The
    lineage is the LOG's as of the last poll.
    """

    def __init__(
        self,
        *,
        name: str,
        bus: Bus,
        objects: ObjectStore,
        log: Log,
        engine: Engine,
        settings: Settings,
        feed: ControlFeed,
        folder: Path,
        busy: Callable[[], int],
    ) -> None:
        self.name, self.version = name, None
        self.states = StateMachine()
        self.figures = ReplicaFigures()
        self.registry = Registry(bus, replica=name, engine=engine, states=self.states, version=lambda: self.version, busy=busy)
        self.on_version: Callable[[], None] = lambda: None
        self.on_news: Callable[[], None] = lambda: None
        self._bus, self._objects, self._log, self._engine = bus, objects, log, engine
        self._settings, self._feed, self._folder = settings, feed, folder
        self._holds = EvalHolds(
            every=settings.eval.every, steps=settings.run.steps, hold_seconds=settings.eval.exact_hold_seconds,
            closed=feed.eval_is_closed, issued=feed.eval_is_issued,
        )  # fmt: skip
        self._copy: Copy | None = None
        self._verdicts: dict[int, asyncio.Future[bool]] = {}
        self._following = False
        self._poll = asyncio.Event()
        self._news = asyncio.Event()

    version: int | None

    @property
    def lineage(self) -> Lineage:
        return self._log.lineage

    async def run(self) -> None:
        """Serve the run for ever. `EngineError` where the engine can't serve any version any more."""
        self._feed.on_change = self._news.set
        try:
            async with asyncio.TaskGroup() as group:
                for part in (self._follow(), self._listen(), self.registry.run(), self._serve()):
                    group.create_task(part)
        except BaseExceptionGroup as failures:
            # One failure is the cause; the others, if any, were underway at the same moment.
            raise failures.exceptions[0] from None

    def drain(self) -> None:
        """Say that the replica takes nothing more."""
        if self.states.state != "draining":
            self.states.go("draining")
            self.registry.renew()

    async def vouched(self, versions: Iterable[int]) -> bool:
        """Whether the engine proved each of these versions; waits while one is being proved."""
        for version in versions:
            verdict = self._verdicts.get(version)
            if verdict is None or not (verdict.result() if verdict.done() else await asyncio.shield(verdict)):
                return False
        return True

    # Following

    async def _follow(self) -> None:
        """Read the LOG every poll_seconds, at once on a hint."""
        while True:
            self._poll.clear()
            try:
                new = await asyncio.to_thread(self._log.refresh)
            except UnavailableError as error:
                _log.warning("log_unreachable", reason=error.message)
                new = []
            if new:
                if self._following:
                    known = set(self.lineage.versions())
                    for entry in new:
                        if entry.number in known:
                            self._holds.know(entry.number, time.monotonic())
                elif path := self.lineage.path():
                    self._following = True
                    self._holds.know(path[-1], time.monotonic())
                self._news.set()
                self.on_news()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.rollout.poll_seconds):
                    await self._poll.wait()

    async def _listen(self) -> None:
        while True:
            try:
                async for _ in self._bus.subscribe_hints("committed", "opened"):
                    self._poll.set()
            except UnavailableError as error:
                # Hints only save time.
                _log.warning("hints_unreachable", reason=error.message)
                await asyncio.sleep(self._settings.rollout.poll_seconds)

    # Serving

    async def _serve(self) -> None:
        self._go("following")
        await self._start_engine()
        while True:
            wanted = self._wanted()
            if wanted is not None and wanted != self.version:
                await self._move(wanted)
                continue
            await self._wait_for_news()

    async def _start_engine(self) -> None:
        """Wait for entry 0 and start the engine on the base model."""
        await self._feed.caught_up.wait()
        while not self.lineage.path():
            self._news.clear()
            await self._news.wait()
        self._go("preparing", "version 0")
        began = time.perf_counter()
        self._copy = await self._patiently(0, lambda: base_copy(self._objects, self._log, self._folder))
        if self._copy is None:
            raise EngineError(f"replica {self.name}: the base model is corrupt: {self.figures.failed[0]}", code="base_corrupt")
        prepared = Prepared(copy=self._copy, changed=set(), prepare_seconds=time.perf_counter() - began, wire_bytes=0)
        self._go("activating", "version 0")
        activation = await self._engine.start(self._folder, 0)
        if self._wanted() != 0:
            # Only where the way begins: what is wanted comes next.
            why = await self._doubt(self._copy, activation)
            self._back()
        else:
            self._verdicts[0] = asyncio.get_running_loop().create_future()
            why = None if await self._prove(prepared, activation, "initial") else self.figures.failed[0]
        if why is not None:
            raise EngineError(f"replica {self.name}: the base model failed: {why}", code="base_failed")

    def _wanted(self) -> int | None:
        self._news.clear()
        now, lineage = time.monotonic(), self.lineage
        return choose(
            lineage, self.version, is_open=lambda version: self._holds.open(lineage, version, now), refused=self.figures.failed
        )

    async def _wait_for_news(self) -> None:
        """Until the LOG or CONTROL changed after the last choice, or the hold on the served version ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._hold_left()):
                await self._news.wait()

    def _hold_left(self) -> float | None:
        """Seconds until the hold on the served version ends by itself."""
        if self.version is None or (until := self._holds.until(self.lineage, self.version)) == -float("inf"):
            return None
        return max(until - time.monotonic(), 0.0) + 0.01

    async def _move(self, version: int) -> None:
        """Prepare the version and serve it, or leave things as they are."""
        self._go("preparing", f"version {version}")
        prepared = await self._patiently(
            version, lambda: prepare(self._objects, self._log, version, self._copy), wanted=lambda: self._wanted() == version
        )
        if prepared is None:
            self._back(version)
            return
        # While it was prepared, an evaluation may have come to hold the served version, or a fork have taken this one away.
        while self._wanted() == self.version and self.lineage.on_line(version):
            await self._wait_for_news()
        if not self.lineage.on_line(version):
            self._back()
            return
        faults.point("replica.prepared")
        self._go("activating", f"version {version}")
        await self._activate(prepared)

    async def _activate(self, prepared: Prepared) -> None:
        copy, mode, good = prepared.copy, self._settings.rollout.activation, self._copy
        self._verdicts[copy.version] = asyncio.get_running_loop().create_future()
        try:
            activation = await self._engine.activate(copy.state, copy.version, mode, prepared.changed)
        except EngineError as error:
            self._fail(copy.version, str(error))
            self._engine.health()
        else:
            faults.point("replica.activated")
            if await self._prove(prepared, activation, mode if self.version is not None else "initial"):
                self._copy = copy
                return
        assert good is not None
        if self._engine.version != good.version:
            again = await self._engine.activate(good.state, good.version, mode, prepared.changed)
            if (why := await self._doubt(good, again)) is not None:
                raise EngineError(
                    f"replica {self.name}: the last good version {good.version} failed too: {why}", code="replica_failed"
                )
        self._back(copy.version)

    async def _prove(self, prepared: Prepared, activation: Activation, mode: Mode) -> bool:
        """Whether the engine serves the version; if so, advertise and acknowledge it."""
        copy = prepared.copy
        difference: float | None = None
        try:
            difference = await self._probe(copy)
            doubt = _doubt(copy, activation, difference)
        except TowlineError as error:
            doubt = f"the probe failed: {error}"
        if doubt is not None:
            self._fail(copy.version, doubt)
            return False
        self._verdicts[copy.version].set_result(True)
        self._holds.serve(copy.version, time.monotonic())
        self.version = copy.version
        figures = self.figures
        figures.activations += 1
        figures.prepare_seconds += prepared.prepare_seconds
        figures.pause_seconds += activation.pause_seconds
        figures.wire_bytes += prepared.wire_bytes
        self._go("serving", f"version {copy.version}")
        self.on_version()
        faults.point("replica.proved")
        await self.registry.acknowledge(
            Ack(
                replica=self.name,
                version=copy.version,
                files_digest=copy.files_digest,
                engine_digest=activation.engine_digest,
                probe_max_abs_diff=difference,
                probe_tolerance=copy.probe.tolerance if copy.probe is not None else None,
                prepare_seconds=prepared.prepare_seconds,
                pause_seconds=activation.pause_seconds,
                wire_bytes=prepared.wire_bytes,
                mode=mode,
                at=time.time(),
            )
        )
        faults.point("replica.acknowledged")
        return True

    async def _probe(self, copy: Copy) -> float | None:
        """Largest |logprob - expected| on the entry's fixed tokens; None without a probe, or without a model to ask."""
        if copy.probe is None or (got := await self._engine.logprobs(list(copy.probe.tokens))) is None:
            return None
        # A NaN on either side must not pass for agreement, as max() would let it.
        differences = [abs(a - b) for a, b in zip(got, copy.probe.logprobs, strict=True)]
        return float("nan") if any(value != value for value in differences) else max(differences, default=0.0)

    async def _doubt(self, copy: Copy, activation: Activation) -> str | None:
        return _doubt(copy, activation, await self._probe(copy))

    async def _patiently(self, version: int, work: Callable[[], T], wanted: Callable[[], bool] = lambda: True) -> T | None:
        """Run `work` on a thread until it succeeds. None where the version isn't wanted any more, or stays corrupt."""
        wait, corrupt = _FIRST_RETRY_SECONDS, 0
        while True:
            try:
                return await asyncio.to_thread(work)
            except (UnavailableError, MissingError) as error:
                _log.warning("prepare_waits", version=version, reason=error.message)
                self.states.detail = f"version {version}: {error.message}"
            except CorruptError as error:
                corrupt += 1
                _log.error("prepare_corrupt", version=version, attempt=corrupt, reason=error.message)
                if corrupt >= PREPARE_TRIES:
                    self._fail(version, error.message)
                    return None
            self.registry.renew()
            await asyncio.sleep(wait)
            wait = min(2 * wait, _MOST_RETRY_SECONDS)
            if not wanted():
                return None

    def _fail(self, version: int, why: str) -> None:
        _log.error("version_failed", version=version, reason=why)
        self.figures.failed[version] = why
        if (verdict := self._verdicts.get(version)) is not None and not verdict.done():
            verdict.set_result(False)

    def _back(self, tried: int | None = None) -> None:
        """To what was served before; by way of `failed` where the version that was tried did."""
        note = ""
        if tried is not None and tried in self.figures.failed:
            note = f"version {tried}: {self.figures.failed[tried]}"
            self._go("failed", note)
            note = f"; failed: {note}"
        if self.version is None:
            self._go("following", note.removeprefix("; "))
        else:
            self._go("serving", f"version {self.version}{note}")

    def _go(self, state: Literal["following", "preparing", "activating", "serving", "failed"], detail: str = "") -> None:
        if self.states.state == "draining":
            return
        self.states.go(state, detail)
        self.registry.renew()


def _doubt(copy: Copy, activation: Activation, difference: float | None) -> str | None:
    """Why the engine doesn't serve the version; None where it does."""
    if activation.engine_digest is not None and activation.engine_digest != copy.files_digest:
        return f"the engine's live weights have the digest {activation.engine_digest}, the version's is {copy.files_digest}"
    if difference is not None and copy.probe is not None and not difference <= copy.probe.tolerance:
        return f"its logprobs on the probe differ by {difference:.3g}, more than {copy.probe.tolerance:.3g}"
    return None
