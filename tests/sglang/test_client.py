"""What a server that answers wrongly, or not to the end, comes to: one of our errors, and never a silent half."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.waiting import until
from towline.engine.sglang.client import SglangClient
from towline.errors import EngineError, UnavailableError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(answer: Any) -> bytes:
    return chunk(b"data: " + json.dumps(answer).encode() + b"\n\n")


def plain(status: int, answer: Any) -> bytes:
    body = json.dumps(answer).encode()
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


class Scripted:
    """Answers every request with the same bytes, then closes. Counts those that are open at a time."""

    def __init__(self) -> None:
        self.answer, self.most, self.open = b"", 0, 0
        self.go = asyncio.Event()
        self.go.set()
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        self.bodies.append(json.loads(await reader.readexactly(int(lengths[0]))) if lengths else {})
        self.open += 1
        self.most = max(self.most, self.open)
        await self.go.wait()
        self.open -= 1
        writer.write(self.answer)
        writer.close()


@pytest.fixture
async def scripted() -> AsyncIterator[tuple[Scripted, SglangClient]]:
    script = Scripted()
    server = await asyncio.start_server(script, "127.0.0.1", 0, backlog=256)
    client = SglangClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", streams=20)
    yield script, client
    await client.close()
    server.close()


async def answers(client: SglangClient) -> list[dict[str, Any]]:
    return [answer async for answer in client.generate({"rid": "r"})]


async def test_a_stream_brings_its_answers_in_order(scripted: tuple[Scripted, SglangClient]) -> None:
    script, client = scripted
    script.answer = HEAD + event({"n": 1}) + event({"n": 2}) + chunk(b"data: [DONE]\n\n") + END
    assert await answers(client) == [{"n": 1}, {"n": 2}]
    assert script.bodies == [{"rid": "r", "stream": True}]


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (HEAD + event({"n": 1}), UnavailableError, "can't be reached at /generate"),
        (HEAD + event({"error": {"message": "too long"}}) + END, EngineError, "refused a request: too long"),
        (HEAD + chunk(b'data: {"n": \n\n') + END, EngineError, "can't be read"),
        (plain(400, {"error": {"message": "no such\nmodel"}}), EngineError, "answered /generate with 400: no such model"),
        (plain(503, "busy"), EngineError, "answered /generate with 503: busy"),
    ],
)
async def test_what_goes_wrong_in_a_stream_is_said(
    scripted: tuple[Scripted, SglangClient], answer: bytes, error: type[Exception], says: str
) -> None:
    script, client = scripted
    script.answer = answer
    with pytest.raises(error, match=says):
        await answers(client)


async def test_a_load_that_answers_without_success_is_a_refusal(scripted: tuple[Scripted, SglangClient]) -> None:
    script, client = scripted
    script.answer = plain(200, {"success": False, "message": "no memory"})
    with pytest.raises(EngineError, match="/update_weights_from_disk with 200: no memory"):
        await client.load_folder("folder", label="1-1", flush=True)


async def test_every_rank_gets_an_entry_of_an_update(scripted: tuple[Scripted, SglangClient]) -> None:
    script, client = scripted
    script.answer = plain(200, {"success": True})
    await client.run_loader("a.load", ranks=3, label=None, flush=False)
    begin, update, end = script.bodies
    assert begin == {"selector": "target"}
    assert len(update["serialized_named_tensors"]) == 3
    assert "weight_version" not in update
    assert end == {}


async def test_no_server_is_unavailable() -> None:
    client = SglangClient("http://127.0.0.1:9", streams=1)
    with pytest.raises(UnavailableError, match="can't be reached at /model_info"):
        await client.model_info()
    await client.close()


async def test_control_calls_dont_wait_for_streams_nor_streams_for_each_other(scripted: tuple[Scripted, SglangClient]) -> None:
    script, client = scripted
    script.answer = HEAD + event({"n": 1}) + END
    script.go.clear()
    # More than it was made for, all on their way at once.
    streams = [asyncio.create_task(answers(client)) for _ in range(30)]
    await until(lambda: script.most == 30)
    call = asyncio.create_task(client.model_info())
    await until(lambda: script.most == 31)
    script.go.set()
    assert await asyncio.gather(*streams) == [[{"n": 1}]] * 30
    await call
