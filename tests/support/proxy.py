"""A TCP proxy before a server, which loses what a test wants lost: answers, or whole connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

_CHUNK_BYTES = 1 << 16


class Proxy:
    """`url` leads to the server. While `swallow` is set its answers are read and lost; `cut` ends all connections."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._host, self._port = parts.hostname, parts.port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.swallow = False
        self.swallowed_bytes = 0
        self.refuse = False

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.close()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.close()
            return
        try:
            there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, there_writer}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, there_writer, answers=False))
                group.create_task(self._pump(there_reader, writer, answers=True))
        finally:
            self._writers -= {writer, there_writer}

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK_BYTES):
                if answers and self.swallow:
                    self.swallowed_bytes += len(data)
                    continue
                sink.write(data)
                await sink.drain()
        sink.close()


@contextlib.asynccontextmanager
async def proxied(target: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(target)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
