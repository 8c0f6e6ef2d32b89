"""Keeps a run's processes alive: restarts what dies, up to a limit, and stops everything in order within a bound.

A service that exits 0 at the run's end is done (before it, somebody else stopped it: it is started again), one that exits 2
has a configuration that no restart can mend, and one that keeps dying, or leaving, is given up: the last two end the run with
a reason. An exit 75 (fenced; comes back as standby) isn't counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from towline.errors import TowlineError, UnavailableError, UsageError
from towline.local.daemon import Daemon
from towline.local.run_directory import Processes, RunDirectory
from towline.local.services import STOP_ORDER, ServiceSpec
from towline.report.figures import Status

FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.25, 8.0
"""Between the death of a service that had lived for a moment only and its next start; each such death doubles it."""
CALM_SECONDS = 15.0
"""A service that lived so long is started again at once: it wasn't its start that failed."""
MOST_FAILURES = 12
"""Deaths of one service within FAILURE_WINDOW_SECONDS that end the run."""
FAILURE_WINDOW_SECONDS = 180.0
SERVER_POLL_SECONDS = 0.5
STAGE_SECONDS = 2.0
"""What the services of one kind get to drain before those of the next kind are told to stop as well."""
SERVICES_SECONDS = 5.5
"""After so long, whatever still runs is killed."""
SERVERS_SECONDS = 2.5
END_GRACE_SECONDS = 5.0
FENCED = 75
STAYS = "buffer"


@dataclass(slots=True)
class _Child:
    spec: ServiceSpec
    process: asyncio.subprocess.Process | None = None
    deaths: deque[float] = field(default_factory=deque)
    done: bool = False


class Supervisor:
    """`start` everything, `wait_done`, `stop`. `on_event(line)` is told what happened, one line each."""

    def __init__(
        self,
        directory: RunDirectory,
        specs: Sequence[ServiceSpec],
        servers: Sequence[Daemon],
        on_event: Callable[[str], None],
    ) -> None:
        self.restarts: Counter[str] = Counter()
        self.pids: set[int] = set()
        """Of every process that was started here, dead ones too."""
        self.run_ended = asyncio.Event()
        """To be set when the run has ended."""
        self.failure: TowlineError | None = None
        self._directory = directory
        self._processes = Processes(directory)
        self._children = [_Child(spec) for spec in specs]
        self._servers = list(servers)
        self._on_event = on_event
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._changed = asyncio.Event()

    def start(self) -> None:
        """Start every service, and watch over them and the servers."""
        self._keepers = [asyncio.create_task(self._keep(child)) for child in self._children]
        self._keepers += [asyncio.create_task(self._keep_server(server)) for server in self._servers]

    async def wait_done(self) -> None:
        """Until every service that ends by itself exited 0; raises what ended the run otherwise.

        The buffer doesn't: it stays for whoever asks, and for a run that is given more steps.
        """
        ending = [child for child in self._children if child.spec.service != STAYS]
        while not all(child.done for child in ending):
            if self.failure is not None:
                raise self.failure
            self._changed.clear()
            await self._changed.wait()

    def learn_ports(self, statuses: Iterable[Status]) -> None:
        """What a service's processes chose: a restart asks for the same."""
        for status in statuses:
            for child in self._children:
                if child.spec.ports and (child.spec.service, child.spec.replica) == (status.service, status.replica):
                    child.spec.ports.learn(status.figures)

    def kill_services(self) -> None:
        """Now, without waiting."""
        self._stopping = True
        for child in self._children:
            _signal(child, signal.SIGKILL)

    async def stop_services(self) -> None:
        """SIGTERM in STOP_ORDER, SIGKILL for what is left after SERVICES_SECONDS."""
        self._stopping = True
        deadline = time.monotonic() + SERVICES_SECONDS
        for service in STOP_ORDER:
            kind = [child for child in self._children if child.spec.service == service]
            for child in kind:
                _signal(child, signal.SIGTERM)
            await self._wait_ended(kind, min(time.monotonic() + STAGE_SECONDS, deadline))
        await self._wait_ended(self._children, deadline)
        self.kill_services()
        await self._wait_ended(self._children, time.monotonic() + 2.0)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def stop_servers(self) -> None:
        """After the services: nobody needs them any more."""
        for server in self._servers:
            server.stop_seconds = SERVERS_SECONDS
        await asyncio.gather(*[asyncio.to_thread(server.stop) for server in self._servers])

    async def _keep(self, child: _Child) -> None:
        """Run a service until it is done, the run is stopped, or it has failed for good."""
        name, delay = child.spec.process, 0.0
        while not self._stopping:
            started = time.monotonic()
            code = await self._run_once(child)
            if self._is_stopping():
                return None
            if code == 0 and await self._has_ended():
                child.done = True
                self._changed.set()
                return None
            if code == UsageError.exit_status:
                return self._fail(UsageError(self._last_words(child, "refused its configuration"), code="service_usage"))
            now = time.monotonic()
            calm = now - started > CALM_SECONDS
            delay = 0.0 if calm else min(max(2 * delay, FIRST_DELAY_SECONDS), LONGEST_DELAY_SECONDS)
            if code != FENCED:
                child.deaths.append(now)
                while child.deaths and child.deaths[0] < now - FAILURE_WINDOW_SECONDS:
                    child.deaths.popleft()
                if len(child.deaths) >= MOST_FAILURES:
                    return self._fail(
                        UnavailableError(self._last_words(child, f"ended {MOST_FAILURES} times"), code="service_died")
                    )
            self.restarts[child.spec.service] += 1
            when = f" in {delay:g} s" if delay else ""
            self._on_event(f"{name} {_how(code)}; starting it again{when} (log: {self._directory.log_path(name)})")
            await asyncio.sleep(delay)
        return None

    async def _has_ended(self) -> bool:
        """Whether the run has; a service may know it a moment earlier than whoever sets `run_ended`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_GRACE_SECONDS):
                await self.run_ended.wait()
        return self.run_ended.is_set()

    async def _run_once(self, child: _Child) -> int:
        path = self._directory.log_path(child.spec.process)
        path.parent.mkdir(parents=True, exist_ok=True)
        environment = child.spec.environment | (child.spec.ports.environment() if child.spec.ports else {})
        with path.open("ab") as log:
            # A session of its own: Ctrl-C is for `towline up`, which stops its services in order.
            child.process = await asyncio.create_subprocess_exec(
                *child.spec.command, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.pids.add(child.process.pid)
        self._processes.record(child.spec.process, child.process.pid)
        if self._stopping:
            _signal(child, signal.SIGTERM)
        code = await child.process.wait()
        self._processes.forget(child.spec.process)
        return code

    async def _keep_server(self, server: Daemon) -> None:
        """Start a server again that was killed, on the same ports and data."""
        deaths = 0
        while not self._stopping:
            await asyncio.sleep(SERVER_POLL_SECONDS)
            if server.pid is not None or self._stopping:
                continue
            deaths += 1
            self.restarts[server.name] += 1
            self._on_event(f"{server.name} is gone; starting it again")
            try:
                await asyncio.to_thread(server.start)
            except UnavailableError as error:
                if deaths >= MOST_FAILURES:
                    return self._fail(error)
                self._on_event(f"{server.name}: {error.message}")
                await asyncio.sleep(min(FIRST_DELAY_SECONDS * 2**deaths, LONGEST_DELAY_SECONDS))
        return None

    async def _wait_ended(self, children: Sequence[_Child], deadline: float) -> None:
        waits = [child.process.wait() for child in children if child.process is not None and child.process.returncode is None]
        if waits:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                    await asyncio.gather(*waits)

    def _is_stopping(self) -> bool:
        return self._stopping  # a call, since it may have changed over an await

    def _fail(self, error: TowlineError) -> None:
        self.failure = self.failure or error
        self._changed.set()

    def _last_words(self, child: _Child, what: str) -> str:
        """Why a service failed: the last thing it said, which is its one-line error."""
        path = self._directory.log_path(child.spec.process)
        lines = path.read_text(errors="replace").strip().splitlines() if path.is_file() else []
        said = lines[-1] if lines else "it said nothing"
        return f"{child.spec.process} {what}: {said} (log: {path})"


def _signal(child: _Child, number: signal.Signals) -> None:
    """To the service's whole process group, so that what it started goes with it."""
    if child.process is not None and child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return "was fenced" if code == FENCED else f"exited with {code}"
