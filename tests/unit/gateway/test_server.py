"""Connections of the API: whoever says nothing loses it, whoever is answered keeps it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from towline.config import GatewaySettings
from towline.gateway.server import ApiServer

HEAD_SECONDS = 0.2
WHOLE = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async def slow(request: Request) -> Response:
        await asyncio.sleep(3 * HEAD_SECONDS)
        return PlainTextResponse("done")

    server = ApiServer(Starlette(routes=[Route("/slow", slow)]), GatewaySettings(), head_seconds=HEAD_SECONDS)
    await server.start()
    yield server.port
    await server.close(1.0)


async def answer(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        return (await reader.readuntil(b"\r\n\r\n")) + await reader.readexactly(4)


@pytest.mark.parametrize("said", [b"", b"GET /slow HTTP/1.1\r\nHost: x\r\nX-"])
async def test_a_connection_without_a_whole_head_is_closed(port: int, said: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()


async def test_a_connection_without_a_whole_second_head_is_closed_though_it_drips(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(WHOLE)
    assert (await answer(reader)).endswith(b"done")
    writer.write(b"GET /slow HTTP/1.1\r\n")

    async def drip() -> None:
        while True:
            writer.write(b"X: y\r\n")
            await asyncio.sleep(HEAD_SECONDS / 4)

    dripping = asyncio.create_task(drip())
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionResetError):  # its drops crossed the closing
            assert await reader.read() == b""
    dripping.cancel()
    writer.close()


async def test_an_answer_may_take_longer_and_its_connection_stays(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(WHOLE[:10])
        await asyncio.sleep(0)
        writer.write(WHOLE[10:])
        assert (await answer(reader)).endswith(b"done")
        await asyncio.sleep(2 * HEAD_SECONDS)
    writer.close()
