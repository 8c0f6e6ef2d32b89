"""A lean HTTP/1.1 client for load: one connection, one request at a time, its answer whole or event by event.

A load generator shares the machine with what it measures, so it must be cheap: this one knows what uvicorn sends, no more.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

LIMIT_BYTES = 4 << 20


class Client:
    """Keeps its connection while it can; a new one after `close` or a failure."""

    def __init__(self, url: str, token: str = "") -> None:
        parts = urlsplit(url)
        self._host, self._tls = parts.hostname or "127.0.0.1", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._head = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n" + (
            f"Authorization: Bearer {token}\r\n" if token else ""
        )
        self.retry_after = 0.0
        """Seconds that the last refusal asked for."""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, method: str, path: str, body: bytes, headers: str = "") -> tuple[int, dict[str, str]]:
        """Send it; (status, lower-case headers) as soon as they are there. Then `whole` or `events`, to the end."""
        if self._writer is None or self._writer.is_closing():
            context = ssl.create_default_context() if self._tls else None
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port, ssl=context, limit=LIMIT_BYTES)
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n{headers}\r\n"
        self._writer.write(head.encode() + body)
        assert self._reader is not None
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        self._length = None if found.get("transfer-encoding") == "chunked" else int(found.get("content-length", 0))
        self._leaves = found.get("connection") == "close"
        return int(first.split(" ", 2)[1]), found

    async def whole(self) -> bytes:
        """The body."""
        return b"".join([part async for part in self._parts()])

    async def events(self) -> AsyncIterator[bytes]:
        """The data of each server-sent event, as it comes."""
        held = b""
        async for part in self._parts():
            *events, held = (held + part).split(b"\n\n")
            for event in events:
                yield event.removeprefix(b"data: ")

    async def _parts(self) -> AsyncIterator[bytes]:
        reader = self._reader
        assert reader is not None
        if self._length is not None:
            if self._length:
                yield await reader.readexactly(self._length)
        else:
            while size := int((await reader.readline()).split(b";")[0] or b"x", 16):
                data = await reader.readexactly(size + 2)
                yield data[:-2]
            await reader.readline()
        if self._leaves:
            self.close()

    def close(self) -> None:
        """Leave at once, whatever was under way."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None
