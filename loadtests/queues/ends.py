"""python -m loadtests.queues.ends: one end of a hop through Redis streams or ZMQ; the other systems' are the load test's own.

Redis: XADD in pipelines of what waits, XREADGROUP of a window, XACK. ZMQ: PUSH and PULL, a line and not a queue that lasts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

import redis.asyncio
import zmq
import zmq.asyncio

from towline.loadtest import systems
from towline.loadtest.ends import Plan, Sink, Source, as_program

KEY, GROUP = "queue", "trainer"
BLOCK_MILLISECONDS = 5000


class RedisSource:
    def __init__(self, plan: Plan) -> None:
        self._window = plan.window
        self._client = redis.asyncio.from_url(os.environ["QUEUES_REDIS"])
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None

    async def open(self) -> None:
        await self._client.ping()
        self._sender = asyncio.create_task(self._send_all())

    async def send(self, number: int, payload: bytes) -> None:
        stands: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((payload, stands))
        self._wake.set()
        await stands

    async def _send_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            # Half a window: the lanes of one half prepare while the other is on its way.
            while self._waiting:
                now, self._waiting = self._waiting[: self._window // 2], self._waiting[self._window // 2 :]
                pipeline = self._client.pipeline(transaction=False)
                for payload, _ in now:
                    pipeline.xadd(KEY, {b"p": payload})
                await pipeline.execute()
                for _, stands in now:
                    stands.set_result(None)

    async def close(self) -> None:
        if self._sender is not None:
            self._sender.cancel()
        await self._client.aclose()


class RedisSink:
    def __init__(self, plan: Plan) -> None:
        self._window = plan.window
        self._client = redis.asyncio.from_url(os.environ["QUEUES_REDIS"], socket_timeout=2 * BLOCK_MILLISECONDS / 1000)

    async def open(self) -> None:
        await self._client.xgroup_create(KEY, GROUP, id="0", mkstream=True)

    async def receive(self) -> AsyncIterator[bytes]:
        while True:
            for _, entries in await self._client.xreadgroup(
                GROUP, "one", {KEY: ">"}, count=self._window, block=BLOCK_MILLISECONDS
            ):
                for _, fields in entries:
                    yield fields[b"p"]
                await self._client.xack(KEY, GROUP, *(entry for entry, _ in entries))

    async def close(self) -> None:
        await self._client.aclose()


class ZmqSource:
    def __init__(self, plan: Plan) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.sndhwm = plan.window

    async def open(self) -> None:
        self._socket.connect(os.environ["QUEUES_ZMQ"])

    async def send(self, number: int, payload: bytes) -> None:
        """It's on the line: ZMQ tells nobody that it arrived."""
        await self._socket.send(payload, copy=False)

    async def close(self) -> None:
        self._socket.close(linger=5000)
        self._context.term()


class ZmqSink:
    def __init__(self, plan: Plan) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.rcvhwm = plan.window

    async def open(self) -> None:
        self._socket.bind(os.environ["QUEUES_ZMQ"])

    async def receive(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._socket.recv()

    async def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def source_of(plan: Plan) -> Source:
    more: dict[str, Callable[[Plan], Source]] = {"redis": RedisSource, "zmq": ZmqSource}
    return more.get(plan.system, systems.source_of)(plan)


def sink_of(plan: Plan) -> Sink:
    more: dict[str, Callable[[Plan], Sink]] = {"redis": RedisSink, "zmq": ZmqSink}
    return more.get(plan.system, systems.sink_of)(plan)


if __name__ == "__main__":
    as_program(source_of, sink_of)
