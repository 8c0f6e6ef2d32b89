"""Ray's queue (ray.util.queue): an actor that holds a list in memory. Many in a call, as its documentation has it for speed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import ray
from loadtests.queues.gathering import Gatherer

from towline.loadtest.ends import Plan

NAME, NAMESPACE = "queue", "queues"


def join() -> None:
    """The cluster of this measurement."""
    ray.init(address=os.environ["QUEUES_RAY"], namespace=NAMESPACE, log_to_driver=False, logging_level="error")


class RaySource:
    def __init__(self, plan: Plan) -> None:
        self._window = plan.window
        self._actor: Any = None
        self._gatherer: Gatherer

    async def open(self) -> None:
        join()
        self._actor = ray.get_actor(NAME)
        self._gatherer = Gatherer(self._put, self._window)

    async def send(self, number: int, payload: bytes) -> None:
        await self._gatherer.send(number, payload)

    async def _put(self, messages: list[tuple[int, bytes]]) -> None:
        """`Queue.put_nowait_batch`, awaited: that method blocks."""
        await self._actor.put_nowait_batch.remote([payload for _, payload in messages])

    async def close(self) -> None:
        self._gatherer.close()
        ray.shutdown()


class RaySink:
    def __init__(self, plan: Plan) -> None:
        self._window = plan.window
        self._actor: Any = None

    async def open(self) -> None:
        join()
        self._actor = ray.get_actor(NAME)

    async def receive(self) -> AsyncIterator[bytes]:
        while True:
            # get_nowait_batch gives just as many as are asked for, or none.
            ready = await self._actor.qsize.remote()
            if not ready:
                yield await self._actor.get.remote()
                continue
            for payload in await self._actor.get_nowait_batch.remote(min(ready, self._window)):
                yield payload

    async def close(self) -> None:
        ray.shutdown()
