"""A service's life: connect, wait for the lease if it has one, run, tell how it's going, drain when asked, exit with a code.

Exit codes: 0 done or drained, 75 fenced (come back as standby), 2 a fault that only a person can mend, 1 anything else. A fault
is one line on standard error, `code: message`; what isn't Towline's own is in the log with its traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import msgspec
import structlog
import uvloop

from towline.access.identity import as_role
from towline.access.roles import role_of
from towline.bus.client import Bus
from towline.bus.topology import STATUS, TOKEN
from towline.config import Settings, load_settings
from towline.errors import FencedError, TowlineError, UnavailableError, UsageError
from towline.runtime.health import Health, HealthServer
from towline.runtime.lease import Lease
from towline.runtime.logging import configure_logging
from towline.runtime.metrics import Metrics
from towline.runtime.metrics_catalogue import CATALOGUE
from towline.runtime.metrics_common import CommonMetrics, MeteredStore
from towline.runtime.tracing import Tracing, begin
from towline.runtime.twins import own_name
from towline.store.blobs import Blobs
from towline.store.objects import ObjectStore, open_store

PID_VARIABLE = "TOWLINE_PID"
"""Set by a process that stands for this one to its supervisor (the launcher of a trainer's ranks): status names its pid."""
STATUS_SECONDS = 1.0
_CANCEL_SECONDS = 1.0
_THREADS_SECONDS = 2.0
_log = structlog.get_logger("towline.service")


class Service(ABC):
    """What a service has and does; subclasses give `name` and `run`.

    `run` returns when its work is done, or soon after `draining` is set: then it finishes what it has begun and takes nothing
    new. It's cancelled after `service.drain_seconds`. It calls `health.ready()` when it's fit for work.
    """

    name: ClassVar[str]
    lease: ClassVar[str | None] = None
    """The lease without which the service stands by; None: any number of replicas work."""

    def __init__(self, settings: Settings, *, bus: Bus, objects: ObjectStore, replica: str) -> None:
        self.settings = settings
        self.bus = bus
        self.objects = objects
        self.replica = replica
        self.health = Health()
        self.metrics = Metrics(self.name)
        self.draining = asyncio.Event()
        self.log = structlog.get_logger(f"towline.{self.name}")

    @abstractmethod
    async def run(self) -> None: ...

    def figures(self) -> Mapping[str, Any]:
        """Numbers for the status entry and /metrics, JSON values; docs/design/002-interfaces.md has each service's."""
        return {}


def service_main(cls: type[Service], arguments: Sequence[str] | None = None) -> NoReturn:
    """`python -m towline.NAME --config run.toml [--replica ID]`: ends the process with the service's exit code.

    At once: taking torch's or numba's modules apart one by one may need seconds, which whoever drains a service hasn't got.
    """
    parser = argparse.ArgumentParser(prog=f"python -m towline.{cls.name}", description=cls.__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's TOML file")
    parser.add_argument("--replica", help="this process's name among its kind; the host's name where it's left out")
    given = parser.parse_args(arguments)
    _exit_now(run_service(cls, given.config, given.replica))


def run_service(cls: type[Service], config_path: Path, replica_id: str | None = None) -> int:
    """The service's whole life, from its settings file to the exit code.

    Two processes of a service never share a `replica_id`: one would take the other's lease and status.
    """
    replica = replica_id or re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())
    try:
        if not TOKEN.fullmatch(replica):
            raise UsageError(f"--replica {replica!r}: use letters, digits, '_' and '-'", code="replica_name")
        settings = as_role(load_settings(config_path), role_of(cls.name))
        configure_logging(settings.service, service=cls.name, replica=replica, run=settings.run.name)
    except TowlineError as error:
        return exit_code(error)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_to_the_end(cls, settings, replica))


async def _to_the_end(cls: type[Service], settings: Settings, replica: str) -> int:
    code = 0
    try:
        await _Life(cls, settings, replica).live()
    except BaseException as error:  # noqa: BLE001  it ends here, as one line and a code
        code = exit_code(error)
    try:
        async with asyncio.timeout(_THREADS_SECONDS):
            await asyncio.get_running_loop().shutdown_default_executor()
    except TimeoutError:
        _exit_now(code)  # a thread that is still at work would hold up the process's end
    return code


def exit_code(error: BaseException) -> int:
    """Say the error on standard error, one line, and give its exit code."""
    own = _own_error(error)
    if own is not None:
        print(f"{own.code}: {own.message}", file=sys.stderr, flush=True)
        return own.exit_status
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 130
    _log.error("crashed", exc_info=error)
    print(f"internal: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return 1


def _own_error(error: BaseException) -> TowlineError | None:
    """The error of Towline's own; of a task group's, the one that says most about what to do. None if another is among them."""
    if isinstance(error, TowlineError):
        return error
    if not isinstance(error, BaseExceptionGroup):
        return None
    found = [_own_error(member) for member in error.exceptions]
    known = [member for member in found if member is not None]
    if len(known) < len(found):
        return None
    return min(known, key=lambda member: (not isinstance(member, FencedError), not isinstance(member, UsageError)))


class _Life:
    """One life of a service's process."""

    def __init__(self, cls: type[Service], settings: Settings, replica: str) -> None:
        self._cls = cls
        self._settings = settings
        self._replica = replica
        self._signals = 0
        self._stop = asyncio.Event()
        self._tracing: Tracing | None = None
        self._common: CommonMetrics | None = None

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, signum)
        starting = asyncio.create_task(self._start())
        if not await self._until_stopped(starting):
            await _cancelled(starting)
            return
        bus, objects = starting.result()
        try:
            async with own_name(self._settings.run.name, self._settings.bus.url, self._cls.name, self._replica):
                await self._serve(self._cls(self._settings, bus=bus, objects=objects, replica=self._replica))
        finally:
            await bus.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)

    async def _start(self) -> tuple[Bus, ObjectStore]:
        settings = self._settings
        self._tracing = await asyncio.to_thread(
            begin, settings.telemetry, service=self._cls.name, replica=self._replica, run=settings.run.name
        )
        objects = MeteredStore(open_store(settings.store))
        await asyncio.to_thread(objects.check)
        run = settings.run.name
        blobs = Blobs(open_store(settings.store.for_blobs) if settings.store.blobs_url else objects, run)
        bus = await Bus.connect(settings.bus, run=run, client_name=f"{run}.{self._cls.name}.{self._replica}", blobs=blobs)
        try:
            await bus.ensure()
        except BaseException:
            await bus.close()
            raise
        return bus, objects

    async def _serve(self, service: Service) -> None:
        service.metrics.show_figures(service.figures, CATALOGUE.get(service.name, ()))
        self._common = CommonMetrics(
            service.metrics, health=service.health, bus=service.bus, replica=service.replica, run=self._settings.run.name
        )
        if isinstance(service.objects, MeteredStore):
            service.objects.show(service.metrics)
        if self._tracing is not None:
            self._tracing.show(service.metrics)
        server = HealthServer(self._settings.service, service.health, service.metrics)
        await server.start()
        _log.info("started", port=server.port, pid=os.getpid())
        _set_aside()
        telling = asyncio.create_task(_tell(service, server.port))
        try:
            async with self._leading(service) as lease:
                if lease is not None or service.lease is None:
                    await self._run(service, lease)
        finally:
            service.health.not_ready("stopped")
            await _cancelled(telling)
            with contextlib.suppress(UnavailableError, TimeoutError):
                async with asyncio.timeout(_CANCEL_SECONDS):
                    await _tell_once(service, server.port)  # the last figures are what a summary adds up
            await server.close()
            _log.info("stopped")

    @contextlib.asynccontextmanager
    async def _leading(self, service: Service) -> AsyncIterator[Lease | None]:
        """Holds the service's lease, if it has one; None as well where it was asked to stop on standby."""
        if service.lease is None:
            yield None
            return
        lease = Lease(service.bus, service.lease, f"{service.name}.{service.replica}")
        acquiring = asyncio.create_task(lease.acquire(service.health.stand_by, service.health.not_ready))
        if not await self._until_stopped(acquiring):
            await _cancelled(acquiring)
            yield None
            return
        if self._common is not None:
            self._common.lease_acquired()
        try:
            yield lease
        finally:
            await lease.release()

    async def _run(self, service: Service, lease: Lease | None) -> None:
        """`run`, while the lease is held, until it ends or is asked to."""
        running = asyncio.create_task(service.run(), name=service.name)
        keeping = None if lease is None else asyncio.create_task(lease.keep(), name="lease")
        others = [] if keeping is None else [keeping]
        try:
            if not await self._until_stopped(running, *others):
                service.health.not_ready("draining")
                service.draining.set()
                _log.info("draining", seconds=self._settings.service.drain_seconds)
                await asyncio.wait(
                    [running, *others], timeout=self._settings.service.drain_seconds, return_when="FIRST_COMPLETED"
                )
                if not running.done() and not (keeping and keeping.done()):
                    _log.warning("drain_cut_short", seconds=self._settings.service.drain_seconds)
                    await self._leave_now(service, running, lease)
            if keeping is not None and keeping.done() and not running.done():
                keeping.result()
            running.result()
        finally:
            await _cancelled(running, *others)

    async def _leave_now(self, service: Service, running: asyncio.Task[None], lease: Lease | None) -> None:
        """Leave although work is going on, also in threads, which nothing can end but the process's end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_SECONDS):
                await _cancelled(running)
                if lease is not None:
                    await lease.release()
                await service.bus.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close, _CANCEL_SECONDS)
        _exit_now(0)

    async def _until_stopped(self, *tasks: asyncio.Task[Any]) -> bool:
        """Wait for the first of the tasks to end; False where a signal came first. Their errors are raised here."""
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([stopping, *tasks], return_when="FIRST_COMPLETED")
        finally:
            stopping.cancel()
        for task in tasks:
            if task.done():
                task.result()
                return True
        return False

    def _on_signal(self, signum: int) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            print(f"stopped: second {signal.Signals(signum).name}", file=sys.stderr)
            _exit_now(128 + signum)


def _exit_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _set_aside() -> None:
    """What there is now lives as long as the process, and the collector needn't go over it again: a collection of all that the
    modules alone hold stops the process for some 30 ms, and comes the later, the more there is."""
    gc.collect()
    gc.freeze()


async def _tell(service: Service, port: int) -> None:
    """Write the status entry every second; while the bus is away the last one expires."""
    settled = False
    while True:
        if service.health.is_ready and not settled:
            _set_aside()  # the engine, the model, a state that was rebuilt
            settled = True
        with contextlib.suppress(UnavailableError):
            await _tell_once(service, port)
        await asyncio.sleep(STATUS_SECONDS)


async def _tell_once(service: Service, port: int) -> None:
    status = {
        "service": service.name,
        "replica": service.replica,
        "pid": int(os.environ.get(PID_VARIABLE, os.getpid())),
        "port": port,
        "ready": service.health.is_ready,
        "reason": service.health.reason,
        "at": time.time(),
        "figures": dict(service.figures()),
    }
    await service.bus.kv(STATUS).put(f"{service.name}.{service.replica}", msgspec.json.encode(status))


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks and wait for their ends; their errors were raised elsewhere or don't matter any more."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        # Again and again: a library may swallow a cancellation.
        done, left = await asyncio.wait(left, timeout=_CANCEL_SECONDS)
        await asyncio.gather(*done, return_exceptions=True)
