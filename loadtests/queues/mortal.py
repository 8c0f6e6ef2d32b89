"""python -m loadtests.queues.mortal send|receive FILE: an end that is there to see what a kill leaves, told its plan by stdin.

It writes each message's number to FILE at once (a write that a SIGKILL can't take back): the sender when it was told that the
message stands, the receiver when it holds it. The sender tries again whatever wasn't acknowledged, as any client would.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from loadtests.queues.ends import sink_of, source_of

from towline.bus.client import Bus
from towline.bus.topology import TRAJECTORY
from towline.config import BusSettings
from towline.loadtest.ends import HEAD, Plan

TRY_SECONDS = 10.0
"""For one send; then it's tried again."""
PAUSE_SECONDS = 0.2


async def send(plan: Plan, record: int) -> None:
    source = source_of(plan)
    await source.open()
    body = os.urandom(plan.payload_bytes - HEAD.size)
    numbers = iter(range(plan.messages))

    async def lane() -> None:
        for number in numbers:
            while True:
                with contextlib.suppress(Exception):  # BLE001: whatever it was, the message has no acknowledgement yet
                    async with asyncio.timeout(TRY_SECONDS):
                        await source.send(number, HEAD.pack(0.0, number) + body)
                    break
                await asyncio.sleep(PAUSE_SECONDS)
            os.write(record, b"%d\n" % number)

    async with asyncio.TaskGroup() as group:
        for _ in range(plan.window):
            group.create_task(lane())
    await asyncio.Event().wait()  # what it still holds goes on its way; the parent ends it


async def receive(plan: Plan, record: int) -> None:
    sink: Any = Stream(plan) if plan.system == "towline" else sink_of(plan)
    await sink.open()
    async for payload in sink.receive():
        _, number = HEAD.unpack_from(payload)
        os.write(record, b"%d\n" % number)


class Stream:
    """TRAJECTORY from its beginning: the load test's own receiver follows batch records, which nobody writes here."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._bus: Bus

    async def open(self) -> None:
        self._bus = await Bus.connect(BusSettings(**self._plan.bus), run=self._plan.run, client_name="crash")

    async def receive(self) -> AsyncIterator[bytes]:
        async with contextlib.aclosing(self._bus.read(TRAJECTORY)) as messages:
            async for message in messages:
                yield message.data


if __name__ == "__main__":
    role, path = sys.argv[1:]
    told = Plan(**json.loads(sys.stdin.readline()))
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    uvloop.run((send if role == "send" else receive)(told, opened))
