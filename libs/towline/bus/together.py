"""Many messages in a few requests: a subject that has one message, as each trajectory's has, names it as its sequence does.

A batched direct get brings what any one of the stream's servers has. It is a short cut only: a message that didn't come, or came
with another sequence, or has its payload elsewhere is left to the get of a single one, which knows how to wait and whom to ask.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import msgspec
from nats.aio.msg import Msg

from towline.bus.connection import Connection
from towline.bus.jetstream import ATTEMPT_SECONDS
from towline.bus.wire import BLOB_HEADER, Message, own_headers, timestamp
from towline.errors import UnavailableError, UsageError

AT_ONCE = 64
"""Messages in one request; the server takes up to 1,024."""
REQUESTS = 4
MOST_BYTES = 4 << 20
"""One request's answers, or one message where that's larger: 16 MiB on their way at most, or four messages."""
MOST_APART = 64
"""Between one message and the next of a request: the server looks at every block in between, which spread ones don't repay."""


async def get_together(connection: Connection, stream: str, places: Iterable[tuple[str, int]]) -> dict[int, Message]:
    """Those of `places` (subject, sequence) that stand there with their payload in them and came, by sequence."""
    gate = asyncio.Semaphore(REQUESTS)
    found: dict[int, Message] = {}

    async def one(chunk: list[tuple[str, int]]) -> None:
        async with gate:
            with contextlib.suppress(UnavailableError, UsageError):  # the get of a single one tells
                await _ask(connection, stream, chunk, found)

    async with asyncio.TaskGroup() as group:
        for chunk in _chunks(places):
            group.create_task(one(chunk))
    return found


def _chunks(places: Iterable[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """In the stream's order, near ones together. One that is alone isn't worth a batch."""
    chunks: list[list[tuple[str, int]]] = []
    for place in sorted(set(places), key=lambda place: place[1]):
        if not chunks or len(chunks[-1]) >= AT_ONCE or place[1] - chunks[-1][-1][1] > MOST_APART:
            chunks.append([])
        chunks[-1].append(place)
    return [chunk for chunk in chunks if len(chunk) > 1]


async def _ask(connection: Connection, stream: str, chunk: list[tuple[str, int]], found: dict[int, Message]) -> None:
    """Put what comes into `found`; again for what the bound on bytes cut off, as long as that gets on. `Unsettled` at a loss."""
    api = f"$JS.API.DIRECT.GET.{stream}"
    while chunk:
        wanted = dict(chunk)
        body = {"multi_last": list(wanted), "batch": len(wanted), "max_bytes": MOST_BYTES}
        last = 0
        arrived: list[Msg] = []
        try:
            end = await connection.request_many(api, msgspec.json.encode(body), arrived, seconds=ATTEMPT_SECONDS)
        finally:  # what came before a loss is as good
            for message in arrived:
                headers = message.headers or {}
                subject, last = headers.get("Nats-Subject", ""), int(headers.get("Nats-Sequence", 0))
                if wanted.get(subject) == last and BLOB_HEADER not in headers:
                    at = timestamp(headers["Nats-Time-Stamp"])
                    found[last] = Message(subject, last, message.data, own_headers(headers), at)
        if not arrived or (end.headers or {}).get("Nats-Num-Pending", "0") == "0":
            return
        chunk = [place for place in chunk if place[1] > last]
