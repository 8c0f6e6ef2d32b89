"""TransferQueue: a controller that knows which rows are there, storage units that hold them in memory, all of them Ray actors.

Rows are put by key, many in a call, as verl puts a group; the receiver asks the controller for as many as are there, reads them
and clears them. The controller answers at once where nothing is there (polling_mode), as streaming users have it: else it sleeps.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
import transfer_queue
from loadtests.queues.gathering import Gatherer
from loadtests.queues.ray_ends import join
from tensordict import TensorDict

from towline.loadtest.ends import Plan

PARTITION, FIELD, TASK = "rollout", "payload", "trainer"
POLL_SECONDS = 0.002
TRIES = 25
"""For half a window, before the receiver is content with less."""

warnings.filterwarnings("ignore", category=UserWarning, module=r"torch")


class TransferQueueSource:
    def __init__(self, plan: Plan) -> None:
        self._window, self._sender = plan.window, plan.sender
        self._gatherer: Gatherer

    async def open(self) -> None:
        await asyncio.to_thread(join)
        await asyncio.to_thread(transfer_queue.init)
        self._gatherer = Gatherer(self._put, self._window)

    async def send(self, number: int, payload: bytes) -> None:
        await self._gatherer.send(number, payload)

    async def _put(self, messages: list[tuple[int, bytes]]) -> None:
        rows = torch.frombuffer(bytearray(b"".join(payload for _, payload in messages)), dtype=torch.uint8)
        fields = TensorDict({FIELD: rows.reshape(len(messages), -1)}, batch_size=len(messages))
        keys = [f"{self._sender}-{number}" for number, _ in messages]
        await transfer_queue.async_kv_batch_put(keys, PARTITION, fields)

    async def close(self) -> None:
        self._gatherer.close()
        ray.shutdown()


class TransferQueueSink:
    def __init__(self, plan: Plan) -> None:
        self._window, self._left = plan.window, plan.messages
        self._client: Any = None

    async def open(self) -> None:
        await asyncio.to_thread(join)
        await asyncio.to_thread(transfer_queue.init)
        self._client = transfer_queue.get_client()

    async def receive(self) -> AsyncIterator[bytes]:
        while self._left > 0:
            metadata = await self._some()
            rows = (await self._client.async_get_data(metadata))[FIELD]
            for place in range(rows.shape[0]):
                self._left -= 1
                yield rows[place].numpy().tobytes()
            await self._client.async_clear_samples(metadata)

    async def _some(self) -> Any:
        """Half a window, or what is there after a while: the controller gives just as many as are asked for, or none."""
        most, tried = min(self._window // 2, self._left), 0
        while True:
            metadata = await self._client.async_get_meta([FIELD], most, PARTITION, mode="fetch", task_name=TASK)
            if metadata.size:
                return metadata
            tried += 1
            if tried % TRIES == 0:
                most = max(most // 2, 1)
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        ray.shutdown()
