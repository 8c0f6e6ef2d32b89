"""How much stands in the run's streams and waits for its consumers, as metrics: asked of the server every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from towline.bus.client import Bus
from towline.bus.topology import CONTROL, POLICY, STREAMS, TRAJECTORY, StreamSpec
from towline.bus.wire import ApiError
from towline.contract.task import TRAIN
from towline.errors import UnavailableError
from towline.runtime.metrics import Metrics

LOOK_SECONDS = 5.0


class Queues:
    """`run` it while the buffer does; a bus that is away leaves the last numbers."""

    def __init__(self, bus: Bus, metrics: Metrics) -> None:
        self._bus = bus
        gauge = metrics.gauge
        self._messages = gauge("stream_messages", "Messages of a stream of the run", ["stream"])
        self._bytes = gauge("stream_size_bytes", "Bytes that they take", ["stream"])
        self._room = gauge("stream_limit_bytes", "Bytes that they may take", ["stream"])
        self._pending = gauge("consumer_pending", "Messages that a consumer hasn't delivered yet", ["consumer"])
        self._in_hand = gauge("consumer_ack_pending", "Messages delivered and not acknowledged", ["consumer"])
        self._again = gauge("consumer_redelivered", "Of these, those delivered more than once", ["consumer"])
        names = bus.topology
        self._consumers: tuple[tuple[str, StreamSpec, str], ...] = (
            ("train", CONTROL, names.lane_consumer(TRAIN, 1).durable),
            ("reward", TRAJECTORY, names.reward_consumer().durable),
            ("publisher", POLICY, names.publisher_consumer().durable),
        )

    async def run(self) -> None:
        while True:
            with contextlib.suppress(UnavailableError):
                await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        for spec in STREAMS:
            state = await self._bus.stream_state(spec)
            self._messages.labels(spec.key).set(state.messages)
            self._bytes.labels(spec.key).set(state.bytes)
            self._room.labels(spec.key).set(state.max_bytes)
        for label, spec, durable in self._consumers:
            info = await self._info(spec, durable)
            self._pending.labels(label).set(info.get("num_pending", 0))
            self._in_hand.labels(label).set(info.get("num_ack_pending", 0))
            self._again.labels(label).set(info.get("num_redelivered", 0))

    async def _info(self, spec: StreamSpec, durable: str) -> dict[str, Any]:
        """Empty where nobody has made the consumer yet."""
        stream = self._bus.topology.stream(spec)
        try:
            return await self._bus.jetstream.call(f"look at consumer {durable}", f"CONSUMER.INFO.{stream}.{durable}")
        except ApiError:
            return {}
