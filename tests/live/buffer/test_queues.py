"""What stands in the streams and waits for consumers, as the buffer's metrics have it from a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from towline.buffer.queues import Queues
from towline.bus.client import Bus
from towline.bus.topology import TRAJECTORY
from towline.config import BusSettings
from towline.runtime.metrics import Metrics


@pytest.fixture
async def bus(bus_settings: BusSettings, run_name: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test-queues")
    await bus.ensure()
    yield bus
    await bus.close()


async def test_queues_are_what_the_server_says(bus: Bus) -> None:
    metrics = Metrics("buffer")
    queues = Queues(bus, metrics)
    await queues.look()  # before there is any consumer
    for sample in range(5):
        await bus.create(bus.topology.trajectory(1, sample), b"x" * 100)
    await bus.dead("reward", b"letter", "why")
    consumer = await bus.consumer(bus.topology.reward_consumer())
    taken = await consumer.fetch(2, 5.0)
    await queues.look()
    text = metrics.render().decode()
    for line in (
        'stream_messages{stream="TRAJECTORY"} 5.0',
        'stream_messages{stream="DEAD"} 1.0',
        'consumer_pending{consumer="reward"} 3.0',
        'consumer_ack_pending{consumer="reward"} 2.0',
        'consumer_pending{consumer="train"} 0.0',
    ):
        assert f"towline_buffer_{line}\n" in text
    state = await bus.stream_state(TRAJECTORY)
    assert f'towline_buffer_stream_size_bytes{{stream="TRAJECTORY"}} {float(state.bytes)}\n' in text
    for delivery in taken:
        await delivery.ack()
    await consumer.close()
