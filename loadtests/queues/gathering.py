"""Sends what waits together, half a window at a time: what a system with a call for many is given, whichever it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Send = Callable[[list[tuple[int, bytes]]], Awaitable[None]]


class Gatherer:
    """`send` returns once the call that took the message has."""

    def __init__(self, send: Send, window: int) -> None:
        self._call, self._most = send, max(window // 2, 1)
        self._waiting: list[tuple[int, bytes, asyncio.Future[None]]] = []
        self._free = asyncio.Semaphore(2)  # the messages of one half are made while the other is on its way
        self._calls: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._loop = asyncio.create_task(self._send_all())

    async def send(self, number: int, payload: bytes) -> None:
        stands: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((number, payload, stands))
        self._wake.set()
        await stands

    async def _send_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._free.acquire()
                now, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                call = asyncio.create_task(self._one(now))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)

    async def _one(self, now: list[tuple[int, bytes, asyncio.Future[None]]]) -> None:
        try:
            await self._call([(number, payload) for number, payload, _ in now])
        except Exception as error:  # noqa: BLE001  whoever sent it hears of it
            for _, _, stands in now:
                if not stands.done():
                    stands.set_exception(error)
        else:
            for _, _, stands in now:
                if not stands.done():
                    stands.set_result(None)
        finally:
            self._free.release()

    def close(self) -> None:
        for task in (self._loop, *self._calls):
            task.cancel()
