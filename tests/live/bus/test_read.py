"""A reader gets every message once and in order, whatever dies under it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter

import pytest

from support.garbage import left_for_the_collector
from support.proxy import proxied
from support.waiting import until
from towline.bus.client import Bus, Message
from towline.bus.topology import OUTCOME, TRAJECTORY
from towline.config import BusSettings
from towline.errors import InvariantError, MissingError
from towline.local.servers import NatsServer

AT_ONCE = 2000


async def _fill(bus: Bus, numbers: range, size: int = 10) -> None:
    for start in range(0, len(numbers), AT_ONCE):  # a call's time counts from its start, also while others are before it
        async with asyncio.TaskGroup() as group:
            for number in numbers[start : start + AT_ONCE]:
                group.create_task(bus.create(bus.topology.trajectory(number, 0), b"%d." % number + b"x" * size))


async def test_a_read_to_the_end_ends_where_the_stream_ended_at_its_start(bus: Bus) -> None:
    assert [message async for message in bus.read(TRAJECTORY, follow=False)] == []
    await _fill(bus, range(5000))
    before = time.time()
    seen: list[Message] = []
    async for message in bus.read(TRAJECTORY, follow=False):
        if not seen:
            await _fill(bus, range(5000, 5100))
        seen.append(message)
    assert [message.sequence for message in seen] == list(range(1, 5001))
    assert {message.subject for message in seen} == {bus.topology.trajectory(number, 0) for number in range(5000)}
    assert all(abs(message.at - before) < 60 for message in seen)
    assert [message.sequence async for message in bus.read(TRAJECTORY, start=5090, follow=False)] == list(range(5090, 5101))
    assert [message async for message in bus.read(TRAJECTORY, start=5101, follow=False)] == []


async def test_a_read_to_the_end_with_a_filter_ends_although_the_last_message_is_another(bus: Bus) -> None:
    for number in range(20):
        await bus.publish(bus.topology.failure(number, 0), b"f")
        await bus.publish(bus.topology.score(number, 0), b"s")
    failures = [bus.topology.subject("outcome.failure.>")]
    async with asyncio.timeout(30):
        found = [message.sequence async for message in bus.read(OUTCOME, subjects=failures, follow=False)]
        nothing = [message async for message in bus.read(OUTCOME, subjects=[bus.topology.score(99, 0)], follow=False)]
        both = [message async for message in bus.read(
            OUTCOME, subjects=[*failures, bus.topology.score(3, 0)], follow=False
        )]  # fmt: skip
    assert found == list(range(1, 41, 2))
    assert nothing == []
    assert len(both) == 21


async def test_a_purged_beginning_is_passed_over(bus: Bus) -> None:
    await _fill(bus, range(10))
    await bus.jetstream.call("purge", f"STREAM.PURGE.{bus.topology.stream(TRAJECTORY)}", {"seq": 6})
    assert [message.sequence async for message in bus.read(TRAJECTORY, follow=False)] == [6, 7, 8, 9, 10]
    await bus.jetstream.call("purge", f"STREAM.PURGE.{bus.topology.stream(TRAJECTORY)}")
    async with asyncio.timeout(30):
        assert [message async for message in bus.read(TRAJECTORY, follow=False)] == []


@pytest.mark.parametrize("size", [10, 100_000])
async def test_a_following_reader_survives_cut_connections(bus: Bus, bus_settings: BusSettings, size: int) -> None:
    count = 3000 if size == 10 else 300
    async with proxied(bus_settings.url) as proxy:
        far = await Bus.connect(bus_settings.model_copy(update={"url": proxy.url}), run=bus.topology.run, client_name="far")
        seen: list[int] = []

        async def follow() -> None:
            async with contextlib.aclosing(far.read(TRAJECTORY)) as messages:
                async for message in messages:
                    seen.append(message.sequence)

        following = asyncio.create_task(follow())
        for start in range(0, count, count // 3):
            await _fill(bus, range(start, start + count // 3), size)
            proxy.cut()
        await until(lambda: len(seen) >= count)
        assert seen == list(range(1, count + 1))
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await far.close()


async def test_a_reader_survives_sigkill_of_the_server(mortal: BusSettings, mortal_server: NatsServer, run_name: str) -> None:
    bus = await Bus.connect(mortal, run=run_name, client_name="test")
    await bus.ensure()
    await _fill(bus, range(20_000))
    killed = 0
    seen: list[int] = []
    async for message in bus.read(TRAJECTORY, follow=False):
        seen.append(message.sequence)
        if len(seen) in (3000, 9000):
            await asyncio.to_thread(mortal_server.kill)
            await asyncio.to_thread(mortal_server.start)
            killed += 1
    assert killed == 2
    assert seen == list(range(1, 20_001))
    await bus.close()


async def test_a_slow_reader_has_a_bounded_backlog_and_misses_nothing(bus: Bus) -> None:
    await _fill(bus, range(200), 300_000)
    received_before = bus.connection._client.stats["in_bytes"]  # type: ignore[union-attr]
    seen = 0
    async for message in bus.read(TRAJECTORY, follow=False):
        seen += 1
        assert message.sequence == seen
        if seen == 1:
            await asyncio.sleep(0.5)
            received = bus.connection._client.stats["in_bytes"] - received_before  # type: ignore[union-attr]
            assert received < 20 << 20
    assert seen == 200


async def test_a_stream_that_was_made_anew_stops_its_reader(bus: Bus) -> None:
    await _fill(bus, range(10))
    messages = bus.read(TRAJECTORY)
    assert [(await anext(messages)).sequence for _ in range(10)] == list(range(1, 11))
    await bus.jetstream.call("delete", f"STREAM.DELETE.{bus.topology.stream(TRAJECTORY)}")
    await bus.ensure()
    await _fill(bus, range(10, 40))
    with pytest.raises(InvariantError, match="went backwards") as caught:
        await asyncio.wait_for(anext(messages), 60.0)
    assert caught.value.code == "stream_regressed"


async def test_a_cursor_past_the_end_stops_its_reader(bus: Bus) -> None:
    await _fill(bus, range(3))
    with pytest.raises(InvariantError, match="message 6 was read, it ends at 3"):
        async for _ in bus.read(TRAJECTORY, start=7):
            pass


async def test_a_stream_that_is_not_there_is_named(bus_settings: BusSettings, run_name: str) -> None:
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test")
    with pytest.raises(MissingError, match=f"towline_{run_name}_OUTCOME"):
        async for _ in bus.read(OUTCOME):
            pass
    await bus.close()


async def test_readers_leave_no_consumer_behind(bus: Bus) -> None:
    await _fill(bus, range(5))
    async for _ in bus.read(TRAJECTORY, follow=False):
        pass
    async with contextlib.aclosing(bus.read(TRAJECTORY)) as messages:
        await anext(messages)
    info = await bus.jetstream.call("look", f"STREAM.INFO.{bus.topology.stream(TRAJECTORY)}")
    assert info["state"]["consumer_count"] == 0


async def test_readers_and_looks_leave_nothing_for_the_collector(bus: Bus) -> None:
    """A registry is read every second, and the last message of a subject is asked for all the time."""
    await _fill(bus, range(20))
    assert await bus.last(TRAJECTORY, bus.topology.trajectory(0, 0)) is not None
    with left_for_the_collector() as left:
        for _ in range(20):
            assert await bus.last(TRAJECTORY, bus.topology.trajectory(77, 0)) is None
            with contextlib.suppress(MissingError):
                await bus.get(TRAJECTORY, 5000)
            assert len([message async for message in bus.read(TRAJECTORY, follow=False)]) == 20
    assert len(left) < 20, Counter(left)
