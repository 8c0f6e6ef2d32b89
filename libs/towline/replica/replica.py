"""Keeps an engine on the run's policy: follows the LOG, prepares, activates, proves and acknowledges versions.

Preparing never pauses generation. A version is advertised once the engine has proved it. What was sampled from a version that
failed this isn't vouched for, and the replica goes back to the last good one. docs/design/042-replica.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import structlog

from towline import faults, spans
from towline.bus.client import Bus
from towline.config import Settings
from towline.contract.entries import BaseEntry, LogEntry, VersionEntry
from towline.contract.policy import ACK_HISTORY, Ack, Served
from towline.engine.base import Activation, Engine
from towline.errors import EngineError
from towline.replica.canary import CanaryWatch
from towline.replica.control import ControlFeed
from towline.replica.following import Following, lag
from towline.replica.host import Copy
from towline.replica.making import Taken
from towline.replica.prepare import Preparer, VersionFailedError
from towline.replica.proof import Proof, prove
from towline.replica.registry import Registry
from towline.replica.states import State, StateMachine
from towline.replica.target import EvalHolds, Subscription, choose
from towline.replica.verdicts import Verdicts
from towline.spans import Span
from towline.store.lineage import Lineage
from towline.store.log import Log
from towline.store.objects import ObjectStore

Mode = Literal["initial", "drain", "in_place", "retract"]
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
        rollout = settings.rollout
        self.name = name
        self.version: int | None = None
        self.states = StateMachine()
        self.figures = ReplicaFigures()
        self.registry = Registry(
            bus, replica=name, engine=engine, states=self.states, version=lambda: self.version, busy=busy,
            subscription=rollout.subscription, failed=self.figures.failed, site=bus.topology.site,
        )  # fmt: skip
        self.on_version: Callable[[], None] = lambda: None
        self.on_news: Callable[[], None] = lambda: None
        self.on_served: Callable[[Served, Activation, float, Mode], None] = lambda served, activation, prepare_seconds, mode: None
        """Called for each version that is acknowledged, with how it got into the engine and the seconds of preparing it."""
        self._log, self._engine, self._feed, self._mode = log, engine, feed, rollout.activation
        self._following = Following(bus, log, poll_seconds=rollout.poll_seconds, on_entries=self._on_entries)
        self._preparer = Preparer(
            objects=objects, log=log, settings=rollout, engine=engine.name, folder=folder, on_wait=self._say
        )
        self._holds = EvalHolds(
            every=settings.eval.every, steps=settings.run.steps, hold_seconds=settings.eval.exact_hold_seconds,
            closed=feed.eval_is_closed, issued=feed.eval_is_issued,
        )  # fmt: skip
        self._subscription = Subscription(
            pinned=rollout.pinned_version, behind=rollout.behind_versions if rollout.subscription == "behind" else 0
        )
        self._canaries = (
            CanaryWatch(share=rollout.canary_share, seconds=rollout.canary_seconds) if rollout.subscription == "canary" else None
        )
        self._good: Copy | None = None
        """Of the version that is served."""
        self._history: deque[Served] = deque(maxlen=ACK_HISTORY)
        self._verdicts = Verdicts()
        self._followed = False
        self._news = asyncio.Event()

    @property
    def lineage(self) -> Lineage:
        return self._log.lineage

    async def run(self) -> None:
        """Serve the run for ever. `EngineError` where the engine can't serve any version any more."""
        self._feed.on_change = self._news.set
        following = self._following
        parts = [following.read_log(), following.hear_hints(), self.registry.run(), self._serve()]
        if self._canaries is not None:
            parts.append(following.watch_canaries(self._canaries, self.name, self._news.set))
        try:
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    group.create_task(part)
        except BaseExceptionGroup as failures:
            # One failure is the cause; the others, if any, were underway at the same moment.
            raise failures.exceptions[0] from None
        finally:
            self._preparer.close()
            if self._good is not None:
                self._good.release()

    def lag(self) -> dict[str, float | None]:
        return lag(self._log, self.version)

    def drain(self) -> None:
        """Say that the replica takes nothing more."""
        if self.states.state != "draining":
            self.states.go("draining")
            self.registry.renew()

    async def vouched(self, versions: Iterable[int]) -> bool:
        """Whether the engine proved each of these versions; waits while one is being proved."""
        return await self._verdicts.vouched(versions)

    def hold(self, version: int, until: float | None) -> None:
        """Put off any newer version until then (monotonic clock); None: no longer."""
        self._holds.keep(version, until)
        self._news.set()

    # Which version

    def _on_entries(self, new: list[LogEntry]) -> None:
        if self._followed:
            for entry in new:
                if isinstance(entry, BaseEntry | VersionEntry):
                    self._holds.know(entry.number, time.monotonic())
        elif 0 in self.lineage:
            self._followed = True
            self._holds.know(self.lineage.latest, time.monotonic())
        self._news.set()
        self.on_news()

    def _wanted(self) -> int | None:
        self._news.clear()
        now, lineage, subscription = time.monotonic(), self.lineage, self._subscription
        if self._canaries is not None and 0 in lineage and not self._canaries.is_canary(self.name, now):
            subscription = Subscription(cleared=self._canaries.cleared(lineage, now))
        return choose(
            lineage, self.version, is_open=lambda version: self._holds.open(lineage, version, now), refused=self.figures.failed,
            subscription=subscription,
        )  # fmt: skip

    def _still_fits(self, version: int) -> bool:
        """Whether a version that was wanted may be served, though another one may be wanted by now."""
        if self._subscription.pinned is not None:
            return self._wanted() == version
        return self.lineage.on_line(version)

    async def _wait_for_news(self) -> None:
        """Until the LOG, CONTROL or the canaries changed after the last choice, or the hold on the served version ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._hold_left()):
                await self._news.wait()

    def _hold_left(self) -> float | None:
        """Seconds until the hold on the served version ends by itself."""
        if self.version is None or (until := self._holds.until(self.lineage, self.version)) == -float("inf"):
            return None
        return max(until - time.monotonic(), 0.0) + 0.01

    # Serving

    async def _serve(self) -> None:
        self._go("following")
        await self._feed.caught_up.wait()
        await self._following.caught_up.wait()
        while True:
            wanted = self._wanted()
            if wanted is not None and wanted != self.version:
                await self._move(wanted)
                continue
            if wanted is None:
                self._nothing_to_serve()
            await self._wait_for_news()

    def _nothing_to_serve(self) -> None:
        """Before entry 0; where the pinned version is not to be had; `EngineError` where every version has failed here."""
        failed, pinned = self.figures.failed, self._subscription.pinned
        if pinned is None:
            if path := self.lineage.path():
                raise EngineError(
                    f"replica {self.name}: no version can be served; version {path[-1]}: {failed.get(path[-1])}",
                    code="replica_failed",
                )
            return
        why = failed.get(pinned) or ("it is quarantined" if pinned in self.lineage else "it isn't in the LOG")
        if self.version is not None:
            self.version = None
            self._go("following")
            self.on_version()
        self._say(f"pinned to version {pinned}: {why}")

    async def _move(self, version: int) -> None:
        """Prepare the version and serve it, or leave things as they are."""
        self._go("preparing", f"version {version}")
        try:
            with self._span("version.prepare", version) as span:
                taken = await self._preparer.prepare(version, lambda: self._wanted() == version)
                if span and taken is not None:
                    span.set(wire_bytes=taken.wire_bytes)
        except VersionFailedError as error:
            self._fail(version, str(error))
            taken = None
        if taken is None:
            self._back(version)
            return
        self._go("prepared", f"version {version}")
        # While it was prepared, an evaluation may have come to hold the served version, or a fork have taken this one away.
        while self._wanted() == self.version is not None and self._still_fits(version):
            await self._wait_for_news()
        if not self._still_fits(version):
            taken.copy.release()
            self._back()
            return
        faults.point("replica.prepared")
        self._go("activating", f"version {version}")
        with self._span("version.activate", version) as span:
            await self._activate(taken, span)

    def _span(self, name: str, version: int) -> Span:
        if spans.tracer is None:
            return spans.NOTHING
        entry = self._log.entry(version)
        span = spans.of_version(name, entry.write_id, committed=not isinstance(entry, BaseEntry))
        span.set(replica=self.name, version=version)
        return span

    async def _activate(self, taken: Taken, span: Span) -> None:
        copy, before = taken.copy, self._good
        mode: Mode = self._mode if self.version is not None else "initial"
        changed = await self._preparer.changed(taken, before, self._engine.version)
        self._verdicts.begin(copy.version)
        try:
            with spans.child("engine.activate", "client"):
                activation = await self._write(copy, changed)
        except EngineError as error:
            self._fail(copy.version, str(error))
            self._engine.health()
        else:
            faults.point("replica.activated")
            with spans.child("version.prove"):
                proof = await prove(self._engine, copy, activation)
            if span:
                span.set(mode=mode, pause_seconds=activation.pause_seconds, probe_difference=proof.difference)
            if proof.doubt is None:
                if before is not None:
                    before.release()
                self._good = copy
                if taken.in_place:
                    copy.release()
                await self._advertise(taken, activation, proof, mode)
                return
            self._fail(copy.version, proof.doubt)
            span.fail(proof.doubt)
        if before is not None and self._engine.version != before.version:
            await self._return_to(before, copy, changed)
        copy.release()
        if taken.in_place and self._good is not None:
            self._good.release()
        self._back(copy.version)

    async def _write(self, copy: Copy, changed: set[str] | None) -> Activation:
        if self._engine.version is not None:
            return await self._engine.activate(copy.state, copy.version, self._mode, changed)
        folder = await self._preparer.engine_folder(copy)
        assert folder is not None
        return await self._engine.start(folder, copy.version)

    async def _return_to(self, good: Copy, failed: Copy, changed: set[str] | None) -> None:
        """Serve the last good version again. `EngineError` where that doesn't succeed."""
        if not good.held:
            # It was changed in place, and has to be put back.
            failed.release()
            try:
                taken = await self._preparer.prepare(good.version, lambda: True)
            except VersionFailedError as error:
                raise EngineError(
                    f"replica {self.name}: the last good version {good.version} isn't there any more: {error}",
                    code="replica_failed",
                ) from error
            assert taken is not None
            good = self._good = taken.copy
        again = await self._engine.activate(good.state, good.version, self._mode, changed)
        proof = await prove(self._engine, good, again)
        if proof.doubt is not None:
            raise EngineError(
                f"replica {self.name}: the last good version {good.version} failed too: {proof.doubt}", code="replica_failed"
            )

    async def _advertise(self, taken: Taken, activation: Activation, proof: Proof, mode: Mode) -> None:
        """The engine serves the version: say so, and acknowledge it."""
        copy, figures, now = taken.copy, self.figures, time.time()
        self._verdicts.judge(copy.version, good=True)
        self._holds.serve(copy.version, time.monotonic())
        self.version = copy.version
        figures.activations += 1
        figures.prepare_seconds += taken.prepare_seconds
        figures.pause_seconds += activation.pause_seconds
        figures.wire_bytes += taken.wire_bytes
        self._go("serving", f"version {copy.version}")
        self.on_version()
        faults.point("replica.proved")
        published = self._log.entry(copy.version).at
        served = Served(version=copy.version, depth=self.lineage.depth(copy.version), published_at=published, at=now)
        self._history.append(served)
        self.on_served(served, activation, taken.prepare_seconds, mode)
        await self.registry.acknowledge(
            Ack(
                replica=self.name,
                version=copy.version,
                files_digest=copy.files_digest,
                engine_digest=activation.engine_digest,
                probe_max_abs_diff=proof.difference,
                probe_tolerance=copy.probe.tolerance if copy.probe is not None else None,
                prepare_seconds=taken.prepare_seconds,
                pause_seconds=activation.pause_seconds,
                wire_bytes=taken.wire_bytes,
                mode=mode,
                at=now,
                history=tuple(self._history),
                failed=dict(figures.failed),
            )
        )
        faults.point("replica.acknowledged")

    # What is said

    def _fail(self, version: int, why: str) -> None:
        _log.error("version_failed", version=version, reason=why)
        self.figures.failed[version] = why
        self._verdicts.judge(version, good=False)

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

    def _go(self, state: State, detail: str = "") -> None:
        if self.states.state == "draining":
            return
        self.states.go(state, detail)
        self.registry.renew()

    def _say(self, detail: str) -> None:
        """Why the state lasts."""
        if self.states.detail != detail and self.states.state != "draining":
            self.states.detail = detail
            self.registry.renew()
