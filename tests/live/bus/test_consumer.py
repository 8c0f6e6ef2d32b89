"""A shared consumer hands each message to one reader, never more than was asked for, and again where it wasn't acked."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace

import pytest

from support.proxy import proxied
from support.waiting import until
from towline.bus.client import Bus
from towline.bus.control_log import ControlLog
from towline.bus.topology import TRAJECTORY, ConsumerSpec
from towline.config import BusSettings, StoreSettings
from towline.local.servers import NatsServer
from towline.store.blobs import Blobs
from towline.store.keys import blob
from towline.store.objects import open_store


async def _tasks(bus: Bus, count: int, lane: str = "train") -> None:
    log = ControlLog(bus, "buffer")
    await log.append([(bus.topology.task(lane), b"%d" % number) for number in range(count)])


def _lane(bus: Bus, **changes: float) -> ConsumerSpec:
    return replace(bus.topology.lane_consumer("train", 64), **changes)  # type: ignore[arg-type]


async def test_readers_share_the_messages_and_each_goes_to_one(bus: Bus) -> None:
    await _tasks(bus, 300)
    readers = [await bus.consumer(_lane(bus)) for _ in range(3)]
    taken: Counter[bytes] = Counter()

    async def work(reader: int) -> None:
        while deliveries := await readers[reader].fetch(7, 0.2):
            assert len(deliveries) <= 7
            for delivery in deliveries:
                assert delivery.num_delivered == 1
                taken[delivery.data] += 1
                await delivery.ack()

    await asyncio.gather(*(work(reader) for reader in range(3)))
    assert taken == Counter(b"%d" % number for number in range(300))
    assert await readers[0].pending() == 0


async def test_a_fetch_takes_no_more_than_it_asked_for(bus: Bus) -> None:
    await _tasks(bus, 50)
    consumer = await bus.consumer(_lane(bus))
    assert len(await consumer.fetch(5, 1.0)) == 5
    info = await bus.jetstream.call("look", f"CONSUMER.INFO.{consumer.spec.stream}.{consumer.spec.durable}")
    assert (info["num_ack_pending"], info["num_pending"]) == (5, 45)


async def test_a_fetch_waits_for_the_first_message_and_not_for_the_rest(bus: Bus) -> None:
    consumer = await bus.consumer(bus.topology.reward_consumer())
    before = time.monotonic()
    assert await consumer.fetch(10, 0.3) == []
    assert 0.25 < time.monotonic() - before < 1.5
    fetching = asyncio.create_task(consumer.fetch(10, 5.0))
    await asyncio.sleep(0.1)
    await bus.create(bus.topology.trajectory(1, 1), b"first")
    assert [delivery.data for delivery in await asyncio.wait_for(fetching, 1.0)] == [b"first"]


async def test_an_unacked_message_comes_again_and_in_progress_holds_it(bus: Bus) -> None:
    await _tasks(bus, 2)
    consumer = await bus.consumer(_lane(bus, ack_wait_seconds=0.6))
    left, held = await consumer.fetch(2, 1.0)
    for _ in range(4):
        await asyncio.sleep(0.3)
        await held.in_progress()
    [again] = await consumer.fetch(2, 1.0)
    assert (again.data, again.num_delivered, again.sequence) == (left.data, 2, left.sequence)
    await left.ack()  # an ack from the earlier delivery counts
    await held.ack()
    assert await consumer.fetch(2, 1.0) == []


async def test_nak_gives_it_back_after_the_delay_and_term_never(bus: Bus) -> None:
    await _tasks(bus, 2)
    consumer = await bus.consumer(_lane(bus))
    first, second = await consumer.fetch(2, 1.0)
    await first.nak(0.3)
    await second.term()
    assert await consumer.fetch(2, 0.1) == []
    [again] = await consumer.fetch(2, 2.0)
    assert (again.data, again.num_delivered) == (first.data, 2)
    await again.nak()
    [third] = await consumer.fetch(2, 1.0)
    assert third.num_delivered == 3


async def test_max_ack_pending_is_updated_live_and_survives_a_new_reader(bus: Bus) -> None:
    await _tasks(bus, 20)
    consumer = await bus.consumer(bus.topology.lane_consumer("train", 2))
    before = time.monotonic()
    assert len(await consumer.fetch(20, 1.0)) == 4
    assert time.monotonic() - before < 0.5, "what is there is handed out at once"
    await consumer.update(max_ack_pending=10)
    assert len(await consumer.fetch(8, 0.2)) == 6
    assert await consumer.fetch(20, 0.2) == []
    await asyncio.sleep(1.0)  # until the first fetch's pull has expired
    newcomer = await bus.consumer(bus.topology.lane_consumer("train", 2))
    await newcomer.update(max_ack_pending=12)
    assert len(await newcomer.fetch(20, 0.2)) == 2


async def test_the_ack_wait_of_a_consumer_that_is_there_is_updated_alone(bus: Bus) -> None:
    await _tasks(bus, 3)
    older = await bus.consumer(bus.topology.lane_consumer("train", 4))
    await older.update(max_ack_pending=2)
    await older.update(ack_wait_seconds=1.0)
    assert len(await older.fetch(3, 0.2)) == 2
    again = await older.fetch(3, 10.0)
    assert [delivery.num_delivered for delivery in again] == [2] * len(again)
    assert 1 <= len(again) <= 2, "max_ack_pending stays as it was"


async def test_a_lane_gets_its_own_tasks_and_reissues_only(bus: Bus) -> None:
    log = ControlLog(bus, "buffer")
    topology = bus.topology
    subjects = [
        topology.task("train"), topology.task("eval", 7), topology.reissue("train"), topology.control("batch"),
        topology.task("eval", 8),
    ]  # fmt: skip
    await log.append([(subject, subject.encode()) for subject in subjects])
    train = await bus.consumer(topology.lane_consumer("train", 8))
    exact = await bus.consumer(topology.lane_consumer("eval", 8, version=7))
    assert [delivery.subject for delivery in await train.fetch(9, 0.2)] == [topology.task("train"), topology.reissue("train")]
    assert [delivery.subject for delivery in await exact.fetch(9, 0.2)] == [topology.task("eval", 7)]


async def test_a_reader_survives_sigkill_of_the_server(mortal: BusSettings, mortal_server: NatsServer, run_name: str) -> None:
    bus = await Bus.connect(mortal, run=run_name, client_name="test")
    await bus.ensure()
    await _tasks(bus, 400)
    consumer = await bus.consumer(_lane(bus))
    taken: set[bytes] = set()

    async def work() -> None:
        while len(taken) < 401:
            for delivery in await consumer.fetch(8, 0.5):
                taken.add(delivery.data)
                await delivery.ack()

    working = asyncio.create_task(work())
    await until(lambda: len(taken) > 100)
    await asyncio.to_thread(mortal_server.kill)
    await asyncio.to_thread(mortal_server.start)
    await until(lambda: len(taken) == 400)
    log = ControlLog(bus, "buffer")
    log.last_sequence = 400
    await log.append([(bus.topology.task("train"), b"after")])
    await asyncio.wait_for(working, 60.0)
    assert taken == {b"%d" % number for number in range(400)} | {b"after"}
    await bus.close()


async def test_a_pull_whose_end_was_lost_on_its_way_is_followed_by_another(
    bus: Bus, bus_settings: BusSettings, run_name: str
) -> None:
    """The connection stays: so it is where one server of a cluster dies, or a leaf's line is cut, behind the reader's server."""
    async with proxied(bus_settings.url) as proxy:
        far = await Bus.connect(bus_settings.model_copy(update={"url": proxy.url}), run=run_name, client_name="far")
        lane = await far.consumer(_lane(bus))
        proxy.swallow = True
        assert await lane.fetch(2, 0.2) == []
        assert proxy.swallowed_bytes > 0
        proxy.swallow = False
        await _tasks(bus, 2)
        taken: list[bytes] = []

        async def came() -> bool:
            taken.extend(delivery.data for delivery in await lane.fetch(2, 1.0))
            return len(taken) == 2

        await until(came)
        assert sorted(taken) == [b"0", b"1"]
        assert far.connected
        await far.close()


async def test_a_consumer_that_went_away_is_made_again(bus: Bus) -> None:
    consumer = await bus.consumer(bus.topology.reward_consumer())
    await bus.jetstream.call("delete", f"CONSUMER.DELETE.{consumer.spec.stream}.{consumer.spec.durable}")
    await bus.create(bus.topology.trajectory(1, 1), b"t")
    assert [delivery.data for delivery in await consumer.fetch(1, 2.0)] == [b"t"]


async def test_a_payload_whose_blob_is_gone_ends_as_an_empty_message_not_as_a_stop(
    bus_settings: BusSettings, run_name: str, file_store_settings: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("towline.bus.consumer.BLOB_DELAY_SECONDS", 0.05)
    objects = open_store(file_store_settings)
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test", blobs=Blobs(objects, run_name))
    await bus.ensure()
    await bus.create(bus.topology.trajectory(1, 0), b"x" * (bus.max_payload + 1))
    await bus.create(bus.topology.trajectory(1, 1), b"small")
    stub = await bus.jetstream.get_from_leader(bus.topology.stream(TRAJECTORY), {"seq": 1})
    assert stub is not None
    objects.delete(blob(run_name, bytes.fromhex(stub.headers["Towline-Blob"])))
    consumer = await bus.consumer(bus.topology.reward_consumer())
    seen: list[tuple[int, bytes]] = []

    async def both() -> bool:
        for delivery in await consumer.fetch(4, 0.2):
            seen.append((delivery.sequence, delivery.data))
            if delivery.sequence == 1:
                assert delivery.headers["Towline-Blob-Error"]
            await delivery.ack()
        return len(seen) == 2

    await until(both)
    assert sorted(seen) == [(1, b""), (2, b"small")]
    await bus.close()
