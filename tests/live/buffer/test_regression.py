"""Streams that lose what they had, and a bus without room, on servers of the tests' own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from live.buffer.harness import Fleet, Trainer, connected, leading, records, seed, settings_for, working
from support.waiting import until
from towline.audit.run import audit
from towline.buffer.leader import Leader
from towline.bus.client import Bus
from towline.bus.topology import CONTROL, OUTCOME, TRAJECTORY, StreamSpec
from towline.config import BusSettings, Settings, StoreSettings
from towline.contract.control import ReissueRecord, TaskRecord
from towline.contract.outcome import decode_outcome
from towline.environment.prompts import Shuffled
from towline.errors import InvariantError, UnavailableError
from towline.store.log import Log


def large_prompts(tokenizer: Any, *, seed: int) -> Shuffled:
    """A task of each is about 100 kB."""
    return Shuffled("large", 50, lambda index: ([index + 3, 1], {"text": "x" * 100_000}), seed=seed)


async def remake(bus: Bus, spec: StreamSpec, keep: int) -> None:
    """As after a disk that came back without its newest blocks: the stream has its first `keep` messages and no more."""
    stream = bus.topology.stream(spec)
    kept = []
    async with contextlib.aclosing(bus.read(spec, follow=False)) as messages:
        async for message in messages:
            if message.sequence <= keep:
                kept.append(message)
    await bus.jetstream.call("delete", f"STREAM.DELETE.{stream}")
    await bus.ensure()
    for message in kept:
        await bus.publish(message.subject, message.data)


def leads(leader: Leader, stop: asyncio.Event) -> asyncio.Task[None]:
    """As the service does: again after what may pass."""

    async def run() -> None:
        while not stop.is_set():
            with contextlib.suppress(UnavailableError):
                await leader.lead(stop)

    return asyncio.create_task(run())


@contextlib.asynccontextmanager
async def running(settings: Settings, bus: Bus, objects: Any, told: list[str]) -> AsyncIterator[Leader]:
    leader, stop = Leader(settings, bus, objects, told.append), asyncio.Event()
    task = leads(leader, stop)
    try:
        yield leader
        stop.set()
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_control_that_lost_its_tail_stops_a_leading_buffer(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings)
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        leader, stop = Leader(settings, bus, objects, lambda state: None), asyncio.Event()
        task = asyncio.create_task(leader.lead(stop))
        await until(lambda: bool(leader.state.open_train))
        await asyncio.sleep(1.2)  # the watch has seen it
        await remake(bus, CONTROL, keep=2)
        with pytest.raises(InvariantError) as found:
            await asyncio.wait_for(task, 60.0)
    assert found.value.code == "stream_regressed"


async def test_a_starting_buffer_finds_that_control_lost_what_others_acted_on(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings, eval={"every": 0})
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        async with working(Fleet(bus, objects, settings)), leading(settings, bus, objects) as leader:
            await until(lambda: len(leader.state.complete) + leader.state.next_depth >= 2)
        for keep in (0, 2):  # nothing is left; or the tasks are gone whose outcomes stand
            await remake(bus, CONTROL, keep=keep)
            with pytest.raises(InvariantError) as found:
                await Leader(settings, bus, objects, lambda state: None).lead(asyncio.Event())
            assert found.value.code == "stream_regressed"


async def test_a_trajectory_stream_that_lost_its_tail_costs_the_groups_concerned_and_no_more(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings, eval={"every": 0})
    told: list[str] = []
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        fleet = Fleet(bus, objects, settings)
        async with running(settings, bus, objects, told) as leader, working(fleet):
            await until(lambda: len(leader.state.complete) == 4)  # no trainer has opened: nothing is batched
            await asyncio.sleep(1.2)  # the watch has seen them
            await remake(bus, TRAJECTORY, keep=3)
            await until(lambda: leader.state.dropped.get("trajectory_lost", 0) == 6)
            await Trainer(bus, objects, settings).train(until_depth=4)
            await until(lambda: leader.finished)
        report = await audit(bus, Log(objects, run_name), settings)
    assert report.clean, report.lines()
    assert report.counts.dropped == {"trajectory_lost": 6}
    assert report.counts.trained == 16
    assert any("lost messages" in state for state in told)


async def test_samples_whose_score_or_trajectory_is_gone_are_had_again(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings, eval={"every": 0})
    told: list[str] = []
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        consumer = await bus.consumer(bus.topology.reward_consumer())
        fleet = Fleet(bus, objects, settings)
        async with running(settings, bus, objects, told) as leader:
            async with working(fleet):
                await until(lambda: fleet.served >= 8)
                for delivery in await consumer.fetch(8, 2.0):
                    await delivery.ack()
                await asyncio.sleep(1.2)
        # While no buffer runs, OUTCOME loses the last five scores and TRAJECTORY the last two trajectories.
        scores = {(s.group, s.sample): s for s in [decode_outcome(m.data) async for m in bus.read(OUTCOME, follow=False)]}
        await remake(bus, OUTCOME, keep=3)
        await remake(bus, TRAJECTORY, keep=6)
        consumer = await bus.consumer(bus.topology.reward_consumer())
        for delivery in await consumer.fetch(6, 2.0):
            await delivery.ack()
        for _ in range(50):
            if (await consumer.pending()) == 0:
                break
            await asyncio.sleep(0.05)
        leader = Leader(settings, bus, objects, told.append)
        leader._suspect = True  # as after a watch that saw it
        stop = asyncio.Event()
        task = leads(leader, stop)

        async def reissued() -> bool:
            return sum(isinstance(r, ReissueRecord) for r in await records(bus)) >= 2

        await until(reissued)
        redelivered: set[str] = set()
        for _ in range(20):
            redelivered |= {d.subject for d in await consumer.fetch(8, 1.0)}
            if len(redelivered) >= 3:
                break
        again = [r for r in await records(bus) if isinstance(r, ReissueRecord)]
        stop.set()
        await task
    assert len(scores) == 8
    assert {r.reason for r in again} == {"lost"}
    assert len(again) == 2
    assert len(redelivered) == 3  # have a trajectory and no score; the first three scores still stand


async def test_a_full_control_is_back_pressure_with_a_name(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, tmp_path: Path
) -> None:
    small = bus_settings.model_copy(update={"budget_bytes": 64 << 20})
    settings = settings_for(
        run_name, small, file_store_settings, eval={"every": 0}, run={"name": run_name, "steps": 5},
        prompts={"source": "live.buffer.test_regression:large_prompts"},
        buffer={"group_size": 2, "groups_per_batch": 10, "max_staleness": 3},
    )  # fmt: skip
    told: list[str] = []
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        async with running(settings, bus, objects, told) as leader:
            await until(lambda: any(state.startswith("bus_full: CONTROL") for state in told))
            held = len(await records(bus))
            await asyncio.sleep(0.5)
            assert len(await records(bus)) == held  # it waits, and nothing is half there
            stream = bus.topology.stream(CONTROL)
            info = await bus.jetstream.call("look", f"STREAM.INFO.{stream}")
            await bus.jetstream.call("grow", f"STREAM.UPDATE.{stream}", info["config"] | {"max_bytes": 64 << 20})
            await until(lambda: len(leader.state.open_train) == 40)
            tasks = [r.task for r in await records(bus) if isinstance(r, TaskRecord)]
            await until(lambda: not told[-1].startswith("bus_full"))
    assert len(tasks) == 80
    assert len({(task.group, task.sample) for task in tasks}) == 80
