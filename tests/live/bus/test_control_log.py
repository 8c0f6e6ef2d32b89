"""CONTROL has one writer at a time, and no append is lost or stands twice, whatever is killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest

from support.proxy import proxied
from support.waiting import until
from towline.bus.client import Bus
from towline.bus.control_log import ControlLog
from towline.bus.topology import CONTROL
from towline.config import BusSettings
from towline.contract.control import WriterRecord, decode_control
from towline.errors import ConflictError, FencedError, UsageError
from towline.local.servers import NatsServer


async def _stored(bus: Bus) -> list[tuple[int, bytes]]:
    return [(message.sequence, message.data) async for message in bus.read(CONTROL, follow=False)]


def _records(bus: Bus, writer: str, numbers: range, size: int = 0) -> list[tuple[str, bytes]]:
    return [(bus.topology.task("train"), f"{writer} {number} ".encode() + b"." * size) for number in numbers]


async def _ends_at(bus: Bus, sequence: int) -> bool:
    return (await bus.stream_state(CONTROL)).last_sequence >= sequence


async def _taken_over(bus: Bus, writer: str | ControlLog) -> ControlLog:
    """A writer that reads to the end and takes over, as often as somebody appends in between."""
    log = ControlLog(bus, writer) if isinstance(writer, str) else writer
    while True:
        log.last_sequence = (await bus.stream_state(CONTROL)).last_sequence
        with contextlib.suppress(ConflictError):
            await log.take_over()
            return log


async def test_appends_get_dense_sequences_and_stand_in_order(bus: Bus) -> None:
    log = await _taken_over(bus, "a")
    records = _records(bus, "a", range(5000))
    assert await log.append(records) == list(range(2, 5002))
    assert await log.append_atomic(_records(bus, "a", range(5000, 5008))) == list(range(5002, 5010))
    assert log.last_sequence == 5009
    stored = await _stored(bus)
    assert isinstance(decode_control(stored[0][1]), WriterRecord)
    assert [data for _, data in stored[1:]] == [data for _, data in _records(bus, "a", range(5008))]


@pytest.mark.parametrize("atomic", [False, True])
async def test_a_successor_fences_the_writer_and_nothing_is_lost_or_twice(bus: Bus, atomic: bool) -> None:
    first = await _taken_over(bus, "old")
    acknowledged: list[bytes] = []
    stop = asyncio.Event()

    async def write_on() -> None:
        number = 0
        while True:
            records = _records(bus, "old", range(number, number + 20))
            await (first.append_atomic(records) if atomic else first.append(records))
            acknowledged.extend(data for _, data in records)
            number += 20
            if number >= 200:
                stop.set()
            await asyncio.sleep(0.002)

    writing = asyncio.create_task(write_on())
    await stop.wait()
    second = await _taken_over(bus, "new")
    assert await second.append(_records(bus, "new", range(50)))
    with pytest.raises(FencedError, match="succeeded"):
        await writing
    with pytest.raises(FencedError):
        await first.append(_records(bus, "old", range(1)))

    stored = [data for _, data in await _stored(bus)]
    assert max(Counter(stored).values()) == 1
    border = next(i for i, data in enumerate(stored) if i and b"new/" in data)
    assert stored[1:border][: len(acknowledged)] == acknowledged
    assert stored[border + 1 :] == [data for _, data in _records(bus, "new", range(50))]
    if atomic:
        assert (border - 1) % 20 == 0


async def test_take_over_tells_that_the_reader_is_not_at_the_end(bus: Bus) -> None:
    first = await _taken_over(bus, "a")
    behind = ControlLog(bus, "b")
    behind.last_sequence = first.last_sequence
    await first.append(_records(bus, "a", range(1)))
    with pytest.raises(ConflictError, match="read on to the end"):
        await behind.take_over()
    behind.last_sequence = (await _stored(bus))[-1][0]
    await behind.take_over()
    with pytest.raises(FencedError):
        await first.append(_records(bus, "a", range(1, 2)))


@pytest.mark.parametrize("atomic", [False, True])
async def test_lost_answers_are_resolved_by_reading_back(bus: Bus, bus_settings: BusSettings, atomic: bool) -> None:
    async with proxied(bus_settings.url) as proxy:
        far = await Bus.connect(bus_settings.model_copy(update={"url": proxy.url}), run=bus.topology.run, client_name="far")
        log = await _taken_over(far, "far")
        proxy.swallow = True
        records = _records(far, "far", range(300))
        appending = asyncio.create_task(log.append_atomic(records) if atomic else log.append(records))
        await until(lambda: _ends_at(bus, 301))
        assert not appending.done()
        proxy.swallow = False
        proxy.cut()
        assert await asyncio.wait_for(appending, 60.0) == list(range(2, 302))
        assert await log.append(_records(far, "far", range(300, 301))) == [302]
        await far.close()
    assert [data for _, data in await _stored(bus)][1:] == [data for _, data in _records(bus, "far", range(301))]


@pytest.mark.parametrize("atomic", [False, True])
async def test_a_full_stream_holds_the_writer_until_there_is_room(bus_settings: BusSettings, run_name: str, atomic: bool) -> None:
    small = bus_settings.model_copy(update={"budget_bytes": 64 << 20})
    bus = await Bus.connect(small, run=run_name, client_name="test")
    await bus.ensure()
    full: list[bool] = []
    waiting = asyncio.Event()

    def on_full(is_full: bool) -> None:
        full.append(is_full)
        waiting.set()

    log = ControlLog(bus, "a", on_full=on_full)
    await log.take_over()
    room = (await bus.stream_state(CONTROL)).max_bytes
    count, size = room // 50_000 + 40, 50_000

    async def append_all() -> None:
        for start in range(0, count, 10):
            records = _records(bus, "a", range(start, start + 10), size)
            await (log.append_atomic(records) if atomic else log.append(records))

    appending = asyncio.create_task(append_all())
    await asyncio.wait_for(waiting.wait(), 20)
    await asyncio.sleep(0.2)
    assert full == [True]
    assert not appending.done()
    stream = bus.topology.stream(CONTROL)
    seen = await _stored(bus)
    floor = seen[-1][0] - 3
    await bus.jetstream.call("purge", f"STREAM.PURGE.{stream}", {"seq": floor})
    kept = [data for sequence, data in seen if sequence < floor]
    await asyncio.wait_for(appending, 20)
    assert full == [True, False]
    stored = kept + [data for _, data in await _stored(bus)]
    expected = [data for _, data in _records(bus, "a", range(-(-count // 10) * 10), size)]
    assert stored[1:] == expected
    await bus.close()


async def test_sigkill_of_the_server_in_the_middle_loses_and_repeats_nothing(
    mortal: BusSettings, mortal_server: NatsServer, run_name: str
) -> None:
    bus = await Bus.connect(mortal, run=run_name, client_name="test")
    await bus.ensure()
    log = await _taken_over(bus, "a")
    appended = 0

    async def append_all() -> None:
        nonlocal appended
        for start in range(0, 20_000, 500):
            await log.append(_records(bus, "a", range(start, start + 490)))
            await log.append_atomic(_records(bus, "a", range(start + 490, start + 500)))
            appended = start + 500

    appending = asyncio.create_task(append_all())
    for threshold in (2_000, 8_000):
        await until(lambda t=threshold: appended >= t)  # type: ignore[misc]
        await asyncio.to_thread(mortal_server.kill)
        assert not appending.done()
        await asyncio.to_thread(mortal_server.start)
    await asyncio.wait_for(appending, 30)
    assert [data for _, data in await _stored(bus)][1:] == [data for _, data in _records(bus, "a", range(20_000))]
    await bus.close()


async def test_a_group_larger_than_an_atomic_batch_is_refused_before_anything_is_sent(bus: Bus) -> None:
    log = await _taken_over(bus, "a")
    with pytest.raises(UsageError, match="1 to 1000"):
        await log.append_atomic(_records(bus, "a", range(1001)))
    assert await log.append(_records(bus, "a", range(1))) == [2]


async def test_a_cancelled_append_demands_a_new_take_over(bus: Bus) -> None:
    log = await _taken_over(bus, "a")
    appending = asyncio.create_task(log.append(_records(bus, "a", range(2000))))
    await asyncio.sleep(0.005)
    appending.cancel()
    await asyncio.gather(appending, return_exceptions=True)
    with pytest.raises(Exception, match="take over again"):
        await log.append(_records(bus, "a", range(1)))
    await _taken_over(bus, log)
    await log.append(_records(bus, "b", range(1)))
    stored = [data for _, data in await _stored(bus)]
    assert max(Counter(stored).values()) == 1
    assert stored[-1] == _records(bus, "b", range(1))[0][1]
