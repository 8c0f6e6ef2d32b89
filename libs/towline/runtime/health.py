"""What a service says of itself to probes: /healthz (alive), /readyz (ready, or why not) and /metrics.

/readyz is for whoever sends work: 200 where there is a replica to send it to. A standby answers it with 503, though it does just
what it should. Whoever asks whether anything is wrong asks /readyz?standbyok=true, which is 200 there too.

Beyond loopback a bearer token is needed; where one is configured it's always asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from towline.config import ServiceSettings
from towline.errors import UsageError
from towline.runtime.metrics import CONTENT_TYPE, Metrics

_START_SECONDS = 10.0
_STOP_SECONDS = 2.0


@dataclass(slots=True)
class Health:
    """A service's own word. `reason` says why it isn't ready; while it is, it may name a state worth seeing (`bus_full`)."""

    is_ready: bool = False
    reason: str = "starting"
    alive: bool = True
    stands_by: bool = False
    """Not ready because another replica is: it waits to take over, and can."""

    def ready(self, reason: str = "") -> None:
        self.is_ready, self.reason, self.stands_by = True, reason, False

    def not_ready(self, reason: str) -> None:
        self.is_ready, self.reason, self.stands_by = False, reason, False

    def stand_by(self, reason: str) -> None:
        self.is_ready, self.reason, self.stands_by = False, reason, True


class HealthServer:
    """Serves a service's health and metrics; `port` is the one that it listens on."""

    def __init__(self, settings: ServiceSettings, health: Health, metrics: Metrics) -> None:
        self._token = settings.secret
        if not self._token and not is_loopback(settings.host):
            raise UsageError(
                f"service.host = {settings.host} listens beyond this machine and needs service.token or token_file; "
                "set one, or use 127.0.0.1",
                code="service_token",
            )
        self._health = health
        self._metrics = metrics
        self._socket = _listen(settings.host, settings.port)
        self.port: int = self._socket.getsockname()[1]
        app = Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics_page),
            ]
        )
        self._server = _Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none"))
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="health-server")
        async with asyncio.timeout(_START_SECONDS):
            await self._server.listening.wait()

    async def close(self) -> None:
        self._server.should_exit = True
        if self._serving is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._serving
        self._socket.close()

    def _refusal(self, request: Request) -> Response | None:
        if not self._token:
            return None
        given = request.headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return None
        return JSONResponse({"error": "a bearer token is needed"}, 401, {"WWW-Authenticate": "Bearer"})

    async def _healthz(self, request: Request) -> Response:
        alive = self._health.alive
        return self._refusal(request) or JSONResponse({"alive": alive}, 200 if alive else 503)

    async def _readyz(self, request: Request) -> Response:
        health = self._health
        answer = {"ready": health.is_ready, "reason": health.reason}
        well = health.is_ready or (health.stands_by and request.query_params.get("standbyok") == "true")
        return self._refusal(request) or JSONResponse(answer, 200 if well else 503)

    async def _metrics_page(self, request: Request) -> Response:
        return self._refusal(request) or Response(self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the service's, which drains first


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # Given by its number, asyncio takes its connections for TCP and switches Nagle's delay off. A protocol of 0, which means
        # the same, leaves it on: an answer in two pieces then waits for an acknowledgement, 40 ms on Linux.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise UsageError(f"service.host = {host}, service.port = {port}: {error}", code="service_port") from None
    return listener


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
