"""Many messages in few requests are the ones that single gets bring, or none; what goes out in pieces arrives as it was."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import nats
import pytest

from support.proxy import proxied
from towline.bus.client import Bus
from towline.bus.outgoing import LARGE_BYTES
from towline.bus.together import AT_ONCE, MOST_APART, MOST_BYTES
from towline.bus.topology import DEAD, TRAJECTORY
from towline.config import BusSettings, StoreSettings
from towline.store.blobs import Blobs
from towline.store.objects import open_store


@pytest.fixture
async def asked(bus: Bus, bus_settings: BusSettings) -> AsyncIterator[list[bytes]]:
    """What was asked of TRAJECTORY's direct get, as a client beside the bus's sees it."""
    seen: list[bytes] = []

    async def see(message: object) -> None:
        seen.append(message.data)  # type: ignore[attr-defined]

    client = await nats.connect(bus_settings.url)
    await client.subscribe(f"$JS.API.DIRECT.GET.{bus.topology.stream(TRAJECTORY)}", cb=see)
    await client.flush()
    yield seen
    await client.close()


async def _fill(bus: Bus, count: int, size: int = 100) -> dict[int, tuple[str, bytes]]:
    """By sequence, what was put there."""
    stood = {}
    for number in range(count):
        subject, data = bus.topology.trajectory(number // 8, number % 8), random.randbytes(size)
        stood[(await bus.create(subject, data, headers={"Towline-X": str(number)})).sequence] = (subject, data)
    return stood


async def test_many_come_in_a_few_requests_and_are_what_single_gets_bring(bus: Bus, asked: list[bytes]) -> None:
    stood = await _fill(bus, 3 * AT_ONCE)
    places = [(subject, sequence) for sequence, (subject, _) in stood.items()]
    random.shuffle(places)
    found = await bus.get_together(TRAJECTORY, places)
    assert {sequence: (message.subject, message.data) for sequence, message in found.items()} == stood
    await asyncio.sleep(0.05)
    assert len(asked) == 3
    for sequence in random.sample(sorted(stood), 5):
        assert found[sequence] == await bus.get(TRAJECTORY, sequence)


async def test_what_is_not_there_as_it_was_named_is_left_out_and_the_rest_comes(bus: Bus) -> None:
    stood = await _fill(bus, 6)
    (gone, _), (moved, _), *kept = [(subject, sequence) for sequence, (subject, _) in stood.items()]
    await bus.jetstream.call("purge", f"STREAM.PURGE.{bus.topology.stream(TRAJECTORY)}", {"filter": gone})
    await bus.jetstream.call("purge", f"STREAM.PURGE.{bus.topology.stream(TRAJECTORY)}", {"filter": moved})
    again = (await bus.create(moved, b"another")).sequence
    never = (bus.topology.trajectory(77, 0), 4)
    found = await bus.get_together(TRAJECTORY, [(gone, 1), (moved, 2), never, *kept])
    assert again == 7
    assert sorted(found) == [3, 4, 5, 6]
    assert all(found[sequence].subject == subject for subject, sequence in kept)
    assert await bus.get_together(TRAJECTORY, [(gone, 1), (moved, 2)]) == {}
    assert await bus.get_together(DEAD, []) == {}


async def test_the_bound_on_bytes_cuts_a_request_and_nothing_is_missing(bus: Bus, asked: list[bytes]) -> None:
    count = 5
    stood = await _fill(bus, count, MOST_BYTES // 2)
    found = await bus.get_together(TRAJECTORY, [(subject, sequence) for sequence, (subject, _) in stood.items()])
    assert {sequence: message.data for sequence, message in found.items()} == {key: data for key, (_, data) in stood.items()}
    await asyncio.sleep(0.05)
    assert 1 < len(asked) <= count


async def test_what_stands_far_apart_or_alone_is_left_to_single_gets(bus: Bus, asked: list[bytes]) -> None:
    stood = await _fill(bus, MOST_APART + 3)
    first, last = min(stood), max(stood)
    assert await bus.get_together(TRAJECTORY, [(stood[key][0], key) for key in (first, last)]) == {}
    found = await bus.get_together(TRAJECTORY, [(stood[key][0], key) for key in (first, first + MOST_APART, last)])
    assert sorted(found) == [first, first + MOST_APART, last]
    await asyncio.sleep(0.05)
    assert len(asked) == 1


async def test_a_payload_in_the_store_is_left_to_the_single_get(
    bus_settings: BusSettings, run_name: str, file_store_settings: StoreSettings
) -> None:
    blobs = Blobs(open_store(file_store_settings), run_name)
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test", blobs=blobs)
    await bus.ensure()
    large = b"l" * (bus.max_payload + 1)
    payloads = [b"small", large, b"small too"]
    places = []
    for sample, payload in enumerate(payloads):
        subject = bus.topology.trajectory(1, sample)
        places.append((subject, (await bus.create(subject, payload)).sequence))
    assert {key: found.data for key, found in (await bus.get_together(TRAJECTORY, places)).items()} == {
        1: b"small",
        3: b"small too",
    }
    assert (await bus.get(TRAJECTORY, 2)).data == large
    await bus.close()


async def test_a_connection_lost_amid_the_answers_is_no_error_and_brings_no_wrong_message(
    bus: Bus, bus_settings: BusSettings
) -> None:
    stood = await _fill(bus, 2 * AT_ONCE, LARGE_BYTES)
    places = [(subject, sequence) for sequence, (subject, _) in stood.items()]
    async with proxied(bus_settings.url) as proxy:
        far = await Bus.connect(bus_settings.model_copy(update={"url": proxy.url}), run=bus.topology.run, client_name="far")
        for delay in (0.0, 0.001, 0.003, 0.006):
            asking = asyncio.create_task(far.get_together(TRAJECTORY, places))
            await asyncio.sleep(delay)
            proxy.cut()
            found = await asking
            assert all(stood[sequence] == (message.subject, message.data) for sequence, message in found.items())
            for subject, sequence in places[:3]:  # the single get waits for the next connection
                assert (await far.get(TRAJECTORY, sequence)).subject == subject
        assert not far.connection._series
        assert len(await far.get_together(TRAJECTORY, places)) == len(places)
        await far.close()


async def test_large_and_small_messages_sent_at_once_arrive_each_as_it_was(bus: Bus) -> None:
    sizes = [0, 1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 4 * LARGE_BYTES, 1 << 20]
    sent: dict[int, tuple[bytes, dict[str, str]]] = {}

    async def send(number: int) -> None:
        data = random.randbytes(sizes[number % len(sizes)])
        headers = {"Towline-Reason": f"é {number}: why"} if number % 2 else {}
        sent[await bus.publish(bus.topology.trajectory(number, 0), data, headers=headers)] = (data, headers)

    async with asyncio.TaskGroup() as group:
        for number in range(8 * len(sizes)):
            group.create_task(send(number))
    read = {message.sequence: message async for message in bus.read(TRAJECTORY, follow=False)}
    assert {key: message.data for key, message in read.items()} == {key: data for key, (data, _) in sent.items()}
    assert all(headers.items() <= read[key].headers.items() for key, (_, headers) in sent.items())


@pytest.mark.parametrize("size", [10, LARGE_BYTES])
async def test_a_header_cannot_end_its_line_whatever_the_size(bus: Bus, size: int) -> None:
    sequence = await bus.publish(bus.topology.dead("x"), b"d" * size, headers={"Towline-Reason": " a\r\nTowline-Forged: b "})
    found = await bus.get(DEAD, sequence)
    assert found.data == b"d" * size
    assert "Towline-Forged" not in found.headers
    assert found.headers["Towline-Reason"].startswith("a")
