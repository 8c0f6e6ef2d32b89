"""The gateway under load: a whole run goes on, with gateways and doors, while clients ask; or clients alone, of deployed ones.

What is asked, and what each part says, is `gateway_parts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

from pydantic import SecretStr

from towline.bus.client import Bus
from towline.config import Settings, TenantSettings
from towline.errors import UnavailableError
from towline.loadtest.drive import Drive, Say
from towline.loadtest.gateway_model import model_files
from towline.loadtest.gateway_parts import Parts
from towline.loadtest.http_client import Client
from towline.loadtest.result import Result, new_result
from towline.loadtest.scenario import Scenario
from towline.loadtest.usage import Usage
from towline.loadtest.watch import LOOK_SECONDS, Watcher
from towline.local.services import MODULES, ServiceSpec, service_environment
from towline.local.supervisor import Supervisor

PLAIN = "loadtest"
"""The tenant of every part but that of the tenants, where there are tenants."""
READY_SECONDS = 120.0


class GatewayDrive(Drive):
    """A run of its own, whose end the last part is."""

    _to_its_end: ClassVar[bool] = False

    def __init__(self, scenario: Scenario, folder: Path, run: str, say: Say, *, keep: bool = False) -> None:
        super().__init__(_with_gateways(scenario), folder, run, say, keep=keep)
        self._parts: Parts | None = None

    def _model_files(self) -> dict[str, bytes]:
        return model_files()

    def _specs(self) -> list[ServiceSpec]:
        directory, settings = self._directory, self._scenario.settings
        specs = super()._specs()
        for index in range(settings.gateway.replicas):
            command = (
                sys.executable, "-m", MODULES["gateway"], "--config", str(directory.settings_path), "--replica", str(index),
            )  # fmt: skip
            specs.append(ServiceSpec("gateway", str(index), command, service_environment(self._scenario.path, 1)))
        return specs

    async def _serve(self, settings: Settings, bus: Bus, watcher: Watcher) -> None:
        supervisor = Supervisor(self._directory, self._specs(), self._daemons, self._on_event)
        supervisor.start()
        usage = Usage(self._pids)
        beside = [asyncio.create_task(self._look(watcher)), asyncio.create_task(usage.run())]
        done = asyncio.create_task(supervisor.wait_done())
        measuring = asyncio.create_task(self._measure(settings, watcher, usage))
        try:
            limit = self._scenario.load.most_seconds
            await asyncio.wait([done, measuring, *beside], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            for task in (*beside, measuring):
                if task.done():
                    task.result()
            if not measuring.done():
                why = "a service ended" if done.done() else f"it took longer than load.most_seconds = {limit:g}"
                raise UnavailableError(f"{why}; logs are in {self._directory.path / 'logs'}", code="loadtest_time")
        finally:
            for task in (*beside, done, measuring):
                task.cancel()
            await asyncio.gather(*beside, done, measuring, return_exceptions=True)
            await supervisor.stop_services()

    async def _look(self, watcher: Watcher) -> None:
        while True:
            await watcher.look(self._pids())
            await asyncio.sleep(LOOK_SECONDS)

    async def _measure(self, settings: Settings, watcher: Watcher, usage: Usage) -> None:
        http, grpc = await self._addresses(settings, watcher)
        self._say(f"{len(http)} gateway{'s' if len(http) > 1 else ''} ready")
        tokens = {name: one.secret for name, one in settings.gateway.tenants.items()}
        self._parts = Parts(
            self._scenario, http, grpc, settings.run.name, tokens, PLAIN if tokens else "", usage, self._say, self._note
        )
        await self._parts.run()

    async def _addresses(self, settings: Settings, watcher: Watcher) -> tuple[list[str], list[str]]:
        """Of the gateways, once each is ready and the whole fleet serves."""
        async with _within(READY_SECONDS, "the gateways aren't ready", self._directory.path / "logs"):
            while True:
                row = watcher.looks.rows[-1] if watcher.looks.rows else {}
                found = [one.figures for one in watcher.looks.statuses if one.service == "gateway" and one.figures.get("api_url")]
                serves = row.get("workers.serving", 0.0) >= self._scenario.load.workers
                if serves and len(found) == settings.gateway.replicas:
                    http = [str(one["api_url"]) for one in found]
                    if all([await ready(url) for url in http]):
                        return http, [f"127.0.0.1:{one['grpc_port']}" for one in found if one.get("grpc_port")]
                await asyncio.sleep(0.2)

    async def _close(self, result: Result, *rest: object) -> None:
        await super()._close(result, *rest)  # type: ignore[arg-type]
        assert self._parts is not None
        self._parts.tell(result)


class GatewayClients:
    """Clients of a deployed cluster's gateways: nothing is started but they, and nothing of the run is read."""

    def __init__(self, scenario: Scenario, folder: Path, run: str, say: Say, *, keep: bool = False) -> None:
        self._scenario, self._say = scenario, say
        self._scratch, self._keep = folder / run, keep

    async def run(self) -> Result:
        scenario, load = self._scenario, self._scenario.load.gateway
        result = new_result(scenario)
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        loop.add_signal_handler(signal.SIGTERM, task.cancel)  # in order, so that no client is left
        tokens = {name: one.secret for name, one in scenario.settings.gateway.tenants.items()}
        async with _within(READY_SECONDS, f"{', '.join(load.urls)}: not ready", None):
            await asyncio.gather(*[_until_ready(url) for url in load.urls])
        parts = Parts(
            scenario, list(load.urls), [], load.model or scenario.settings.run.name, tokens, next(iter(tokens), ""), None,
            self._say, self._say,
        )  # fmt: skip
        try:
            async with asyncio.timeout(scenario.load.most_seconds):
                await parts.run()
        finally:
            if not self._keep:
                await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)
        parts.tell(result)
        return result


def _with_gateways(scenario: Scenario) -> Scenario:
    """Settings that have what the parts need: gateways, doors, gRPC, and a token for each tenant that has none."""
    load, gateway = scenario.load.gateway, scenario.settings.gateway
    tenants = dict(gateway.tenants)
    if load.tenants or tenants:
        for name in (PLAIN, *load.tenants):
            tenants.setdefault(name, TenantSettings(token=SecretStr(secrets.token_hex(16))))
    gateway = gateway.model_copy(
        update={
            "replicas": load.gateways, "doors": True, "port": 0, "grpc_port": 0 if load.grpc else None, "ui": False,
            "tenants": tenants,
        }
    )  # fmt: skip
    return scenario.model_copy(update={"settings": scenario.settings.model_copy(update={"gateway": gateway})})


async def ready(url: str) -> bool:
    """Whether /health says so."""
    client = Client(url)
    try:
        status, _ = await client.send("GET", "/health", b"")
    except (OSError, EOFError):
        return False
    finally:
        client.close()
    return status == 200


async def _until_ready(url: str) -> None:
    delay = 0.1
    while not await ready(url):
        await asyncio.sleep(delay)
        delay = min(2 * delay, 1.0)


@contextlib.asynccontextmanager
async def _within(seconds: float, what: str, logs: Path | None) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        said = f"; their logs are in {logs}" if logs else ""
        raise UnavailableError(f"{what} after {seconds:g} s{said}", code="gateway_ready") from None
