"""Redis streams: XADD in pipelines of what waits, XREADGROUP of a window, XACK."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import redis.asyncio
from loadtests.queues.gathering import Gatherer

from towline.loadtest.ends import Plan

KEY, GROUP = "queue", "trainer"
BLOCK_MILLISECONDS = 5000


class RedisSource:
    def __init__(self, plan: Plan) -> None:
        self._window = plan.window
        self._client = redis.asyncio.from_url(os.environ["QUEUES_REDIS"])
        self._gatherer: Gatherer

    async def open(self) -> None:
        await self._client.ping()
        self._gatherer = Gatherer(self._add, self._window)

    async def send(self, number: int, payload: bytes) -> None:
        await self._gatherer.send(number, payload)

    async def _add(self, messages: list[tuple[int, bytes]]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for _, payload in messages:
            pipeline.xadd(KEY, {b"p": payload})
        await pipeline.execute()

    async def close(self) -> None:
        self._gatherer.close()
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
