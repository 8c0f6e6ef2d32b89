"""`towline up`: one run on one machine, from settings to summary.

Checks first, so that a fault is one line before any service starts; then it watches until the buffer says that the run is
finished. However it ends, nothing is left running: in order by itself, by the guard process where it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from towline.access.init import prepare_bus
from towline.audit.report import AuditReport
from towline.audit.run import audit
from towline.bundle.source import BusSource
from towline.bus.client import Bus
from towline.bus.topology import CONTROL, STATUS
from towline.config import Settings
from towline.contract.task import SESSION, TRAIN
from towline.errors import TowlineError, UsageError
from towline.local.changes import changed
from towline.local.cleanup import CLEAN, UP, end_leftovers, start_guard
from towline.local.daemon import Daemon
from towline.local.effective import effective, with_made_model
from towline.local.ended import why_ended
from towline.local.live import View
from towline.local.preflight import preflight
from towline.local.run_directory import Processes, RunDirectory
from towline.local.services import service_specs
from towline.local.summary import Summary, read_control, summarise
from towline.local.supervisor import Supervisor
from towline.report.figures import FigureBook, decode_statuses
from towline.report.history import read_history
from towline.report.page import render, write
from towline.report.progress import Progress, progress_of
from towline.runtime.files import write_private
from towline.runtime.halves import check_store_as_new
from towline.runtime.run_end import run_has_ended
from towline.store.blobs import Blobs
from towline.store.log import Log
from towline.store.objects import ObjectStore, open_store

POLL_SECONDS = 1.0
FINISH_SECONDS = 20.0
"""What the services get to see the run's end and exit by themselves."""
LAST_LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished run."""

    summary: Summary
    audit: AuditReport


class Interrupted(Exception):
    """SIGINT or SIGTERM (`number`): the run was stopped in order and goes on at the next `towline up`."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class _Clock:
    """Keeps the book's time and restart count, on disk too: other shells read it, and a later `towline up` adds to it."""

    def __init__(self, book: FigureBook, supervisor: Supervisor) -> None:
        self._book = book
        self._supervisor = supervisor
        self._started = time.monotonic()
        self._before = (book.wall_seconds, book.restarts)

    def save(self) -> None:
        seconds, restarts = self._before
        self._book.wall_seconds = seconds + time.monotonic() - self._started
        self._book.restarts = restarts + self._supervisor.restarts.total()
        self._book.save()


class Up:
    """One `towline up`; the caller holds the run directory's lock."""

    def __init__(self, given: Settings, source: Path, directory: RunDirectory, console: Console) -> None:
        self._given = given
        self._source = source
        self._directory = directory
        self._console = console
        self._servers: list[Daemon] = []
        self._supervisor: Supervisor | None = None
        self._interrupted: int | None = None

    async def run(self) -> Finished:
        """Raises `Interrupted`, or the `TowlineError` that ended the run."""
        work = asyncio.ensure_future(self._run())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number, work)
        guard = await asyncio.to_thread(start_guard, self._directory)
        Processes(self._directory).record(UP, os.getpid())
        try:
            return await work
        except asyncio.CancelledError:
            if self._interrupted is None:
                raise
            raise Interrupted(self._interrupted) from None
        finally:
            await self._stop_servers()
            Processes(self._directory).forget(UP)
            with contextlib.suppress(BrokenPipeError):
                await asyncio.to_thread(guard.communicate, CLEAN)

    def _on_signal(self, number: int, work: asyncio.Future[Finished]) -> None:
        """The first stops in order, the second at once."""
        if self._interrupted is None:
            self._interrupted = number
            self._say("stopping")
            work.cancel()
        elif self._supervisor is not None:
            self._supervisor.kill_services()

    async def _run(self) -> Finished:
        await self._check_settings()
        settings = await self._start_servers()
        self._tell_changes(settings)
        self._directory.save(settings, self._source)
        objects = open_store(settings.store)
        await asyncio.to_thread(objects.check)
        await prepare_bus(settings)
        name = settings.run.name
        bus = await Bus.connect(settings.bus, run=name, client_name=f"up-{name}", blobs=Blobs(objects, name))
        try:
            await self._check_stores(bus, Log(objects, name), settings)
            found = await preflight(self._directory, self._source, settings, model=True)
            if found.note:
                self._directory.model_note_path.write_text(found.note)
            if self._directory.model_note_path.is_file():
                self._say(f"model: {self._directory.model_note_path.read_text()}")
            settings = with_made_model(settings, self._directory)
            self._directory.save(settings, self._source)
            if await run_has_ended(bus, settings.run.steps):
                self._say(await why_ended(bus, name))
                book = FigureBook(self._directory.figures_path)
            else:
                self._directory.summary_path.unlink(missing_ok=True)
                book = await self._watch_services(settings, bus)
            return await self._close(settings, bus, objects, book)
        finally:
            await bus.close()

    async def _check_settings(self) -> None:
        """Before anything is started."""
        given = effective(self._given, self._source, self._directory, self._given.bus, self._given.store)
        await preflight(self._directory, self._source, given, model=False)

    def _tell_changes(self, settings: Settings) -> None:
        if not self._directory.exists:
            return
        with contextlib.suppress(UsageError):  # of an older Towline's keys
            for line in changed(self._directory.load(), settings):
                self._say(f"changed since the run was last up: {line}")

    async def _check_stores(self, bus: Bus, log: Log, settings: Settings) -> None:
        """Bus and store hold the same run: one that goes on with half of it would train on what it has no weights for."""
        await asyncio.to_thread(log.refresh)
        name, url = settings.run.name, settings.store.url
        if not log.next_number:
            if any([await bus.last(CONTROL, bus.topology.task(lane)) for lane in (TRAIN, SESSION)]):
                raise UsageError(
                    f"run {name} has records on the bus, and {url} has no LOG of it: it ran with another store; "
                    "name that one with --store, or another run with --run",
                    code="store_mismatch",
                )
            return
        head, last = log.lineage.latest, (await bus.stream_state(CONTROL)).last_sequence
        if head and log.version(head).batch_cursor > last:
            raise UsageError(
                f"run {name} has versions in {url} that were trained on batches which the bus doesn't have: it ran with another "
                "bus; name that one in bus.url, or another run with --run",
                code="bus_mismatch",
            )
        await check_store_as_new(bus, log)

    async def _start_servers(self) -> Settings:
        """Those that the settings don't name; the effective settings."""
        bus, store = self._given.bus, self._given.store
        nats = None if bus.url else self._directory.nats()
        s3 = None if store.url else self._directory.s3()
        self._servers = [server for server in (nats, s3) if server is not None]
        await asyncio.gather(*[asyncio.to_thread(server.start) for server in self._servers])
        bus = bus if nats is None else nats.settings(bus)
        store = store if s3 is None else s3.settings(store)
        at = f" at {store.endpoint}" if store.endpoint else ""
        self._say(f"bus: {bus.url}{'' if nats is None else ' (started here)'}")
        self._say(f"store: {store.url}{at}{'' if s3 is None else ' (started here)'}")
        return effective(self._given, self._source, self._directory, bus, store)

    async def _watch_services(self, settings: Settings, bus: Bus) -> FigureBook:
        """Run the services to the run's end; every process's last figures."""
        specs = service_specs(self._directory, settings, self._source)
        book = FigureBook(self._directory.figures_path)
        title = f"towline {settings.run.name}: {settings.run.steps} steps, logs in {self._directory.path / 'logs'}"
        with View(self._console, title, Counter(spec.service for spec in specs)) as view:
            supervisor = self._supervisor = Supervisor(self._directory, specs, self._servers, view.event)
            clock = _Clock(book, supervisor)
            supervisor.start()
            done = asyncio.create_task(supervisor.wait_done())
            try:
                finished = False
                while not (finished or done.done()):
                    progress = await self._look(settings, bus, supervisor, book)
                    view.show(progress, book)
                    clock.save()
                    finished = progress.finished or await self._has_ended(settings, bus)
                    await asyncio.wait([done], timeout=POLL_SECONDS)
                supervisor.run_ended.set()
                until = time.monotonic() + FINISH_SECONDS
                while not done.done() and time.monotonic() < until:
                    await asyncio.wait([done], timeout=POLL_SECONDS)
                    view.show(await self._look(settings, bus, supervisor, book), book)
                if done.done():
                    done.result()
            finally:
                done.cancel()
                await supervisor.stop_services()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_LOOK_SECONDS):
                        await self._look(settings, bus, supervisor, book)
                clock.save()
                await asyncio.gather(done, return_exceptions=True)
        return book

    async def _look(self, settings: Settings, bus: Bus, supervisor: Supervisor, book: FigureBook) -> Progress:
        """Where the run stands now; where the bus is away for a moment, where it stood."""
        with contextlib.suppress(TowlineError, TimeoutError):
            async with asyncio.timeout(2 * POLL_SECONDS):
                statuses = decode_statuses(await bus.kv(STATUS).items())
                # An entry outlives its process by some seconds: what an earlier `up`'s processes said isn't news.
                mine = [status for status in statuses if status.pid in supervisor.pids]
                book.update(mine)
                supervisor.learn_ports(mine)
        return progress_of(book, steps=settings.run.steps, max_staleness=settings.buffer.max_staleness)

    async def _has_ended(self, settings: Settings, bus: Bus) -> bool:
        """By CONTROL: the buffer that leads may be one that somebody else started."""
        with contextlib.suppress(TowlineError, TimeoutError):
            async with asyncio.timeout(2 * POLL_SECONDS):
                return await run_has_ended(bus, settings.run.steps)
        return False

    async def _close(self, settings: Settings, bus: Bus, objects: ObjectStore, book: FigureBook) -> Finished:
        """Audit and summary, with the servers still up."""
        log = Log(objects, settings.run.name)
        report = await audit(bus, log, settings)
        summary = summarise(settings.run.name, log, await read_control(bus), report, book)
        write_private(self._directory.summary_path, json.dumps(summary.plain(), indent=2) + "\n")
        await self._draw(BusSource(bus, objects, settings, log), summary, report)
        return Finished(summary, report)

    async def _draw(self, source: BusSource, summary: Summary, report: AuditReport) -> None:
        """report.html; a run without the extra `plots` is as good."""
        facts = [
            ("rollout", f"{summary.trajectories_per_s:.0f} trajectories/s, {summary.tokens_per_s:.0f} tokens/s"),
            ("trainer idle", f"{summary.trainer_idle_share:.0%}"),
            ("audit", "clean" if report.clean else f"{len(report.violations)} violations"),
        ]
        history = await read_history(source)
        try:
            html = await asyncio.to_thread(render, history, max_staleness=source.settings.buffer.max_staleness, facts=facts)
        except ModuleNotFoundError as error:
            self._say(f"no report: no module {error.name!r}; pip install 'towline[plots]'")
            return
        write(self._directory.report_path, html)

    async def _stop_servers(self) -> None:
        supervisor = self._supervisor or Supervisor(self._directory, [], self._servers, self._say)
        await supervisor.stop_servers()
        # A service whose start was under way when everything was stopped.
        await asyncio.to_thread(end_leftovers, self._directory)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
