"""The publisher on a real bus: every staged record gets a verdict, whatever comes twice, late, damaged or from nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from live.publisher.harness import next_staged, said, send, settings_for, staged_of
from live.store.faulty import Faulty
from live.store.models import Run, begun, same, stepped
from support.waiting import until
from towline.bus.client import Bus
from towline.bus.topology import CONTROL, DEAD
from towline.config import BusSettings, StoreSettings
from towline.contract.codec import encode
from towline.contract.control import EndRecord
from towline.contract.policy import Committed, Opened, Refused
from towline.errors import UnavailableError
from towline.publisher.publishing import Publishing
from towline.store.log import Log
from towline.store.materialize import materialize
from towline.store.objects import ObjectStore


@pytest.fixture
async def bus(bus_settings: BusSettings, run_name: str) -> AsyncIterator[Bus]:
    settings = bus_settings.model_copy(update={"budget_bytes": 64 << 20})
    bus = await Bus.connect(settings, run=run_name, client_name="test")
    await bus.ensure()
    yield bus
    await bus.close()


@pytest.fixture
def store_settings(file_store_settings: StoreSettings) -> StoreSettings:
    """What the store promises is proved elsewhere, of both kinds."""
    return file_store_settings


@pytest.fixture
def run(objects: ObjectStore, run_name: str) -> Run:
    return begun(objects, run_name)


class Served:
    def __init__(self) -> None:
        self.states: list[str | None] = []
        self.draining = asyncio.Event()
        self.publishing: Publishing
        self.task: asyncio.Task[Any]


@asynccontextmanager
async def serving(
    bus: Bus,
    run: Run,
    bus_settings: BusSettings,
    store_settings: StoreSettings,
    objects: ObjectStore | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """A publisher in this process, drained at the end."""
    served = Served()
    made = settings_for(run.log.run, bus_settings, store_settings, **settings)
    served.publishing = Publishing(made, bus, objects or run.objects, served.states.append)
    served.task = asyncio.create_task(served.publishing.run(served.draining))
    try:
        yield served
        if not served.task.done():
            served.draining.set()
            assert await asyncio.wait_for(served.task, 60.0) == "drained"
    finally:
        served.task.cancel()


async def test_what_is_staged_is_committed_and_said(
    bus: Bus, run: Run, bus_settings: BusSettings, store_settings: StoreSettings
) -> None:
    async with serving(bus, run, bus_settings, store_settings, anchor_every=2) as served:
        for _ in range(4):
            staged, state = next_staged(run)
            await send(bus, staged)
            await until(lambda write_id=staged.write_id: _log_holds(run, write_id))  # type: ignore[misc]
            run.states[run.log.lineage.latest] = state
        await until(lambda: served.publishing.figures()["anchors"] == 2)
        await until(lambda: served.publishing.figures()["committed"] == 4)
    assert run.log.lineage.path() == [0, 2, 3, 4, 5]
    assert same(materialize(run.objects, run.log, 5), run.states[5])
    committed = await said(bus)
    assert [(m.number, m.write_id) for m in committed if isinstance(m, Committed)] == [
        (n, run.log.entry(n).write_id) for n in (2, 3, 4, 5)
    ]
    hint = run.log.read_hint()
    assert hint is not None
    assert (hint.number, hint.anchors) == (5, (0, 3, 5))
    assert served.states[-1] is None
    figures = served.publishing.figures()
    assert figures["head"] == 5
    assert figures["verify_seconds"] > 0  # type: ignore[operator]
    assert figures["commit_seconds"] > 0  # type: ignore[operator]


async def test_staged_again_and_again_is_one_entry_and_as_many_answers(
    bus: Bus, run: Run, bus_settings: BusSettings, store_settings: StoreSettings
) -> None:
    staged, _ = next_staged(run)
    for _ in range(3):
        await send(bus, staged)
    async with serving(bus, run, bus_settings, store_settings), serving(bus, run, bus_settings, store_settings):
        await until(lambda: _count(bus, 3))
    assert await said(bus) == [Committed(number=2, epoch=1, write_id=staged.write_id)] * 3
    run.log.refresh()
    assert run.log.next_number == 3


def _log_holds(run: Run, write_id: str) -> bool:
    run.log.refresh()
    return run.log.find(write_id) is not None


async def _count(bus: Bus, wanted: int) -> bool:
    return len(await said(bus)) == wanted


async def test_a_refusal_is_said_with_its_reason(
    bus: Bus, run: Run, bus_settings: BusSettings, store_settings: StoreSettings
) -> None:
    zombie, _ = next_staged(run)
    damaged = staged_of(run.stage(stepped(run.states[0], 9)))
    part = f"{damaged.folder}/part-00000.safetensors"
    run.objects.put(part, run.objects.get(part)[:-1])
    await send(bus, damaged)
    async with serving(bus, run, bus_settings, store_settings):
        await until(lambda: _count(bus, 1))
        run.fork(0)
        await send(bus, zombie)
        await until(lambda: _count(bus, 2))
    first, second = await said(bus)
    assert isinstance(first, Refused)
    assert isinstance(second, Refused)
    assert (first.write_id, second.write_id) == (damaged.write_id, zombie.write_id)
    assert part in first.reason
    assert second.reason.startswith("epoch: ")
    assert (await (await bus.consumer(bus.topology.publisher_consumer())).pending()) == 0


async def test_a_record_that_nobody_can_act_on_goes_to_dead_whole(
    bus: Bus, run: Run, bus_settings: BusSettings, store_settings: StoreSettings
) -> None:
    junk = [b"\xc1junk", encode(Opened(epoch=1))]
    for data in junk:
        await bus.publish(bus.topology.policy("staged"), data)
    staged, _ = next_staged(run)
    await send(bus, staged)
    async with serving(bus, run, bus_settings, store_settings):
        await until(lambda: _count(bus, 1))
    assert [m.data async for m in bus.read(DEAD, follow=False)] == junk


async def test_a_publisher_that_starts_first_waits_for_the_base_and_the_epoch(
    bus: Bus, objects: ObjectStore, run_name: str, bus_settings: BusSettings, store_settings: StoreSettings
) -> None:
    empty = Run(objects, Log(objects, run_name))
    async with serving(bus, empty, bus_settings, store_settings) as served:
        await until(lambda: "log_empty" in served.states)
        run = begun(objects, run_name)
        await until(lambda: served.states[-1] is None)
        staged, _ = next_staged(run)
        await send(bus, staged)
        await until(lambda: _count(bus, 1))


async def test_a_store_that_is_away_is_waited_for_and_named(
    bus: Bus, run: Run, bus_settings: BusSettings, store_settings: StoreSettings
) -> None:
    faulty = Faulty(run.objects)

    def away(key: str) -> None:
        raise UnavailableError("the store is away", code="store_unavailable")

    faulty.before_create = away
    staged, _ = next_staged(run)
    await send(bus, staged)
    async with serving(bus, run, bus_settings, store_settings, faulty) as served:
        await until(lambda: "store_unavailable" in served.states)
        assert await said(bus) == []
        faulty.before_create = lambda key: None
        await until(lambda: _count(bus, 1))
        await until(lambda: served.states[-1] is None)
    assert await said(bus) == [Committed(number=2, epoch=1, write_id=staged.write_id)]


async def test_it_leaves_when_the_run_is_over_and_not_before(
    bus: Bus, run: Run, bus_settings: BusSettings, store_settings: StoreSettings
) -> None:
    end = bus.topology.control("end")
    await bus.publish(end, encode(EndRecord(writer="b/1", reason="steps", depth=2)))  # the run wants 3 steps now
    async with serving(bus, run, bus_settings, store_settings) as served:
        await asyncio.sleep(1.3)
        assert not served.task.done()
        await bus.publish(end, encode(EndRecord(writer="b/2", reason="steps", depth=3)))
        assert await asyncio.wait_for(served.task, 60.0) == "ended"
    assert (await bus.stream_state(CONTROL)).messages == 2
