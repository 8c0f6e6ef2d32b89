"""The API's HTTP server inside a service's event loop: signals are the service's, and draining lets running requests end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from towline.config import GatewaySettings
from towline.errors import UsageError
from towline.runtime.health import is_loopback

_START_SECONDS = 10.0
_KEEP_ALIVE_SECONDS = 30
HEAD_SECONDS = 20.0
"""A request's line and headers are in by then, or its connection is closed."""
BACKLOG = 2048


class ApiServer:
    """`port` is the one that it listens on. `UsageError` where it may not, or can't, listen there."""

    def __init__(self, app: Starlette, settings: GatewaySettings, *, head_seconds: float = HEAD_SECONDS) -> None:
        if not settings.tenants and not is_loopback(settings.host):
            raise UsageError(
                f"gateway.host = {settings.host} listens beyond this machine and needs gateway.tenants with their tokens; "
                "set one, or use 127.0.0.1",
                code="gateway_tenants",
            )
        for name in ("tls_certificate", "tls_key"):
            if (path := getattr(settings, name)) and not Path(path).is_file():
                raise UsageError(f"gateway.{name} = {path}: no such file", code="gateway_tls")
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            ssl_certfile=settings.tls_certificate or None, ssl_keyfile=settings.tls_key or None, server_header=False,
            backlog=BACKLOG, proxy_headers=False,
        )  # fmt: skip
        try:
            config.load()
        except (ssl.SSLError, OSError) as error:
            raise UsageError(f"gateway.tls_certificate, gateway.tls_key: {error}", code="gateway_tls") from None
        config.http_protocol_class = type("Protocol", (_HeadInTime, config.http_protocol_class), {"head_seconds": head_seconds})
        self._socket = _listen(settings)
        self.port: int = self._socket.getsockname()[1]
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="api-server")
        async with asyncio.timeout(_START_SECONDS):
            await self._server.listening.wait()

    async def close(self, seconds: float) -> None:
        """Accept nothing more, let running requests end within that time, then cut them."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=seconds)
            if not self._serving.done():
                self._server.force_exit = True
                await asyncio.wait([self._serving], timeout=1.0)
        self._socket.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _HeadInTime(asyncio.Protocol):
    """Before one of uvicorn's protocols, which wait for a head for ever: who opens connections and says little would have all
    that the process may open."""

    head_seconds: float
    cycle: Any
    """uvicorn's request and answer; None before the first."""
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport = transport
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._served:
            self._rest()
        elif self._deadline is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        super().connection_lost(exc)

    @property
    def _served(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(self.head_seconds, self._over)

    def _rest(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _over(self) -> None:
        self._deadline = None
        if not self._served:
            self._transport.close()


def _listen(settings: GatewaySettings) -> socket.socket:
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        # With its protocol named: asyncio asks for it before it turns Nagle's delay off, which costs a stream 40 ms a piece.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        raise UsageError(
            f"gateway.host = {settings.host}, gateway.port = {settings.port}: {error}", code="gateway_port"
        ) from None
    return listener
