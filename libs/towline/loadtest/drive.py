"""One run under load: servers (or the addresses that the scenario names), services as `towline up` starts them, synthetic
workers and trainer, disturbances, then audit and figures. However it ends, nothing is left running."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import ClassVar

import psutil

from towline.access.identity import as_role
from towline.access.init import prepare_bus
from towline.access.roles import TRAINER
from towline.audit.run import audit
from towline.bus.client import Bus
from towline.config import Settings
from towline.errors import TowlineError, UnavailableError, UsageError
from towline.loadtest.collect import collect
from towline.loadtest.figures import fill
from towline.loadtest.model import seed_policy
from towline.loadtest.plan import write_plan
from towline.loadtest.result import Result, new_result
from towline.loadtest.scenario import Disturbance, Scenario, at_addresses
from towline.loadtest.watch import LOOK_SECONDS, Watcher
from towline.local.cleanup import CLEAN, UP, end_leftovers, start_guard
from towline.local.daemon import Daemon
from towline.local.run_directory import Processes, RunDirectory
from towline.local.services import MODULES, ServiceSpec, service_environment
from towline.local.supervisor import Supervisor
from towline.runtime.run_end import run_has_ended
from towline.store.blobs import Blobs
from towline.store.log import Log
from towline.store.objects import ObjectStore, open_store

SYNTHETIC = {"rollout_worker": "towline.loadtest.workers", "trainer": "towline.loadtest.trainer"}
FINISH_SECONDS = 30.0
Say = Callable[[str], None]


class Drive:
    """`run` once. The folder is the run's own and must be new."""

    _to_its_end: ClassVar[bool] = True
    """A run that ends before run.steps has failed."""

    def __init__(self, scenario: Scenario, folder: Path, run: str, say: Say, *, keep: bool = False) -> None:
        self._scenario, self._say, self._keep = scenario, say, keep
        self._directory = RunDirectory(folder.absolute() / run)
        self._began = time.time()
        self._events: list[tuple[float, str]] = []
        self._said, self._depth = (0.0, 0.0), 0.0

    async def run(self) -> Result:
        """`TowlineError` where the run couldn't be carried through; what it found is judged by the caller."""
        scenario, directory = self._scenario, self._directory
        if directory.path.exists():
            raise UsageError(f"{directory.path} is there already: a load test needs a run of its own", code="run_exists")
        result = new_result(scenario)
        with directory.lock():
            async with _guarded(directory), self._servers() as settings:
                objects = open_store(settings.store)
                await asyncio.to_thread(objects.check)
                name = settings.run.name
                bus = await Bus.connect(settings.bus, run=name, client_name=f"loadtest-{name}", blobs=Blobs(objects, name))
                try:
                    await prepare_bus(settings)
                    await asyncio.to_thread(
                        seed_policy,
                        open_store(as_role(settings, TRAINER).store),
                        name,
                        scenario.load.trainer.model_bytes,
                        settings.run.seed,
                        self._model_files(),
                    )
                    write_plan(settings, scenario.load)
                    directory.save(settings, scenario.path)
                    watcher = Watcher(bus)
                    await self._serve(settings, bus, watcher)
                    await self._close(result, settings, bus, objects, watcher)
                finally:
                    await bus.close()
        if not self._keep:
            for part in ("nats", "s3", "replicas"):
                await asyncio.to_thread(shutil.rmtree, directory.path / part, ignore_errors=True)
        return result

    def _model_files(self) -> dict[str, bytes]:
        """Beside the synthetic policy's weights."""
        return {}

    @contextlib.asynccontextmanager
    async def _servers(self) -> AsyncIterator[Settings]:
        """Those that the scenario doesn't name; the run's settings."""
        given, directory = self._scenario.settings, self._directory
        nats = None if given.bus.url else directory.nats()
        s3 = None if given.store.url else directory.s3()
        self._daemons: list[Daemon] = [server for server in (nats, s3) if server is not None]
        try:
            await asyncio.gather(*[asyncio.to_thread(server.start) for server in self._daemons])
            bus = given.bus if nats is None else nats.settings(given.bus)
            store = given.store if s3 is None else s3.settings(given.store)
            yield at_addresses(self._scenario, bus, store, directory.path.parent, directory.name)
        finally:
            await asyncio.gather(*[asyncio.to_thread(server.stop) for server in self._daemons], return_exceptions=True)
            await asyncio.to_thread(end_leftovers, directory)

    def _specs(self) -> list[ServiceSpec]:
        load, directory = self._scenario.load, self._directory
        specs = []
        for service in MODULES:
            if service not in load.start:
                continue
            module = SYNTHETIC.get(service, MODULES[service])
            for index in range(min(load.processes, load.workers) if service == "rollout_worker" else 1):
                command = (sys.executable, "-m", module, "--config", str(directory.settings_path), "--replica", str(index))
                specs.append(ServiceSpec(service, str(index), command, service_environment(self._scenario.path, 1)))
        return specs

    async def _serve(self, settings: Settings, bus: Bus, watcher: Watcher) -> None:
        """The services, until the run's end."""
        supervisor = Supervisor(self._directory, self._specs(), self._daemons, self._on_event)
        supervisor.start()
        done = asyncio.create_task(supervisor.wait_done())
        disturbing = asyncio.create_task(self._disturb(watcher))
        deadline = time.monotonic() + self._scenario.load.most_seconds
        said_at = 0.0
        try:
            while not await self._ended(settings, bus):
                if done.done():
                    done.result()
                    break
                if disturbing.done():
                    disturbing.result()
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"the run isn't over after load.most_seconds = {self._scenario.load.most_seconds:g}; its logs are in "
                        f"{self._directory.path / 'logs'}",
                        code="loadtest_time",
                    )
                row = await watcher.look(self._pids())
                if time.monotonic() - said_at >= 5.0:
                    said_at = time.monotonic()
                    self._say(self._line(row, settings))
                await asyncio.wait([done], timeout=LOOK_SECONDS)
            disturbing.cancel()
            supervisor.run_ended.set()
            await watcher.look(self._pids())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FINISH_SECONDS):
                    await asyncio.shield(done)
        finally:
            for task in (done, disturbing):
                task.cancel()
            await asyncio.gather(done, disturbing, return_exceptions=True)
            await supervisor.stop_services()

    async def _ended(self, settings: Settings, bus: Bus) -> bool:
        with contextlib.suppress(TowlineError, TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                return await run_has_ended(bus, settings.run.steps)
        return False

    async def _close(self, result: Result, settings: Settings, bus: Bus, objects: ObjectStore, watcher: Watcher) -> None:
        log = Log(objects, settings.run.name)
        self._say("auditing")
        report = await audit(bus, log, settings)
        await asyncio.to_thread(log.refresh)
        found = await collect(bus, log)
        fill(result, found, watcher.looks, settings.buffer.max_staleness)
        result.violations = [str(violation) for violation in report.violations]
        result.metrics["audit.violations"] = float(len(report.violations))
        result.metrics["audit.rows_checked"] = float(report.rows_checked)
        result.metrics["audit.open"] = float(report.counts.open)
        result.events = [(at - found.began_at, what) for at, what in self._events]
        if report.violations:
            result.failed.append(f"the audit found {len(report.violations)} violations; the first: {report.violations[0]}")
        if self._to_its_end and report.depth < settings.run.steps:
            result.failed.append(f"the run ended at depth {report.depth} of {settings.run.steps}: {report.end_reason}")

    # Disturbances

    async def _disturb(self, watcher: Watcher) -> None:
        """Each in its own time, from the moment at which the fleet serves."""
        await watcher.serving.wait()
        async with asyncio.TaskGroup() as group:
            for one in self._scenario.load.disturbances:
                group.create_task(self._repeat(one))
        await asyncio.Event().wait()

    async def _repeat(self, one: Disturbance) -> None:
        await asyncio.sleep(one.at_seconds)
        turn = 0
        while True:
            await self._do(one, turn)
            turn += 1
            if not one.every_seconds:
                return
            await asyncio.sleep(one.every_seconds)

    async def _do(self, one: Disturbance, turn: int) -> None:
        """To the target's processes in turn."""
        alive = Processes(self._directory).alive()
        names = sorted(name for name in alive if name == one.target or name.startswith(f"{one.target}-"))
        if one.target == "nats-server":
            names, alive = await asyncio.to_thread(self._nats)
        if not names:
            return
        name = names[turn % len(names)]
        process = alive[name]
        self._note(f"{one.action} {name}")
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.action == "kill":
                process.kill()
                return
            process.suspend()
            try:
                await asyncio.sleep(one.seconds)
            finally:
                process.resume()
            self._note(f"resume {name}")

    def _nats(self) -> tuple[list[str], dict[str, psutil.Process]]:
        found = {server.name: psutil.Process(server.pid) for server in self._daemons if server.pid is not None}
        return [name for name in found if name == "nats-server"], found

    def _note(self, what: str) -> None:
        self._events.append((time.time(), what))
        self._say(what)

    def _on_event(self, line: str) -> None:
        self._say(line)

    # What is said

    def _pids(self) -> dict[str, int]:
        found = {name: process.pid for name, process in Processes(self._directory).alive().items() if name != UP}
        return found | {server.name: server.pid for server in self._daemons if server.pid is not None}

    def _line(self, row: dict[str, float], settings: Settings) -> str:
        """The depth is the furthest that a trainer told: one just started again has told none. Rate: since the last line."""
        seconds, samples = time.time() - self._began, row.get("trajectory.messages", self._said[1])
        rate = max(samples - self._said[1], 0.0) / max(seconds - self._said[0], 1e-9)
        self._said = (seconds, samples)
        self._depth = max(self._depth, row.get("trainer.depth", 0.0))
        return (
            f"{seconds:5.0f} s  depth {self._depth:.0f}/{settings.run.steps}"
            f"  serving {row.get('workers.serving', 0):.0f}/{self._scenario.load.workers}"
            f"  trajectories {samples:.0f}, {rate:.0f}/s"
            f"  tasks waiting {row.get('tasks.waiting', 0):.0f}, in hand {row.get('tasks.in_hand', 0):.0f}"
        )


@contextlib.asynccontextmanager
async def _guarded(directory: RunDirectory) -> AsyncIterator[None]:
    """A guard process ends what a killed load test leaves; SIGTERM ends it in order."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    guard = await asyncio.to_thread(start_guard, directory)
    Processes(directory).record(UP, os.getpid())
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        Processes(directory).forget(UP)
        with contextlib.suppress(BrokenPipeError):
            await asyncio.to_thread(guard.communicate, CLEAN)
