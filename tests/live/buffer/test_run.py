"""The buffer on a real bus and store: whole runs, restarts, forks, fences, snapshots."""

from __future__ import annotations

import asyncio

import pytest

from live.buffer.harness import SLOTS, Fleet, Trainer, connected, leading, records, seed, settings_for, working
from support.waiting import until
from towline.audit.run import audit
from towline.buffer.dump import dump
from towline.buffer.figures import figures
from towline.buffer.leader import Leader
from towline.buffer.replay import read_control, read_outcomes, rebuild
from towline.buffer.state import State
from towline.bus.topology import CONTROL
from towline.config import BusSettings, StoreSettings
from towline.contract.control import (
    BatchRecord,
    CancelRecord,
    DropRecord,
    EndRecord,
    EvalRecord,
    ForkRecord,
    ReissueRecord,
    SnapshotRecord,
    WriterRecord,
)
from towline.contract.task import TRAIN
from towline.errors import FencedError
from towline.store.blobs import Blobs
from towline.store.log import Log


@pytest.fixture(params=[0, 1], ids=["sync", "async"])
def staleness(request: pytest.FixtureRequest) -> int:
    return int(request.param)


async def test_a_whole_run_ends_and_its_audit_is_clean(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, staleness: int
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings, buffer={
        "group_size": 2, "groups_per_batch": 2, "max_staleness": staleness})  # fmt: skip
    async with connected(settings) as (bus, objects), leading(settings, bus, objects) as leader:
        await seed(objects, run_name)
        trainer = Trainer(bus, objects, settings)
        async with working(Fleet(bus, objects, settings, fail_every=5)) as fleet:
            await trainer.train(until_depth=4)
            await until(lambda: leader.finished)
            info = await bus.jetstream.call("look", f"CONSUMER.INFO.{bus.topology.stream(CONTROL)}.lane-train")
        report = await audit(bus, Log(objects, run_name), settings)
        standing = await records(bus)
        shown = figures(leader.state, leader.lineage, 4)
    assert report.clean, report.lines()
    assert report.finished
    assert (report.depth, report.counts.trained, report.counts.evaluated, report.counts.open) == (4, 16, 9, 0)
    assert report.rows_checked == 25
    assert report.staleness_max <= staleness
    batches = [record for record in standing if isinstance(record, BatchRecord)]
    assert [(batch.for_depth, len(batch.rows)) for batch in batches] == [(depth, 4) for depth in range(4)]
    assert [record.depth for record in standing if isinstance(record, EvalRecord)] == [0, 2, 4]
    again = [record for record in standing if isinstance(record, ReissueRecord)]
    assert {(record.task.group, record.task.sample) for record in again} == fleet.failed
    assert len(fleet.failed) >= 3
    assert isinstance(standing[-1], EndRecord)
    assert info["config"]["max_ack_pending"] == 2 * SLOTS
    assert (shown["trained"], shown["evaluated"], shown["open"]) == (16, 9, 0)
    assert shown["reward_first"] == shown["evals"][0][2]
    assert shown["reward_last"] == shown["evals"][-1][2]
    assert fleet.tasks[0].sampling.stop_token_ids == (2, 4)


async def test_forks_and_restarts_in_between_keep_the_audit_clean(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings, run={"name": run_name, "steps": 6}, buffer={
        "group_size": 2, "groups_per_batch": 2, "max_staleness": 2, "off_line": "keep"})  # fmt: skip
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        trainer = Trainer(bus, objects, settings)
        async with working(Fleet(bus, objects, settings, fail_every=7)):
            async with leading(settings, bus, objects):
                await trainer.train(until_depth=3)
            forking = asyncio.create_task(trainer.train(until_depth=5, base_depth=1))
            async with leading(settings, bus, objects):
                await forking
            last = asyncio.create_task(trainer.train(until_depth=6))
            async with leading(settings, bus, objects) as leader:
                await last
                await until(lambda: leader.finished)
                live = dump(leader.state)
                report = await audit(bus, Log(objects, run_name), settings)
                rebuilt = await rebuild(bus, Blobs(objects, run_name))
                await read_outcomes(bus, rebuilt)
        standing = await records(bus)
    assert report.clean, report.lines()
    assert report.counts.trained == 24
    assert dump(rebuilt) == live
    assert [record.depth for record in standing if isinstance(record, ForkRecord)] == [0, 1, 5]
    assert sum(isinstance(record, WriterRecord) for record in standing) == 3


async def test_a_second_buffer_fences_the_first(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings)
    async with connected(settings) as (bus, objects), connected(settings, "second") as (other_bus, _):
        await seed(objects, run_name)
        draining = asyncio.Event()
        first = Leader(settings, bus, objects, lambda state: None)
        leading_first = asyncio.create_task(first.lead(draining))
        await until(lambda: bool(first.state.open_train))
        async with leading(settings, other_bus, objects) as second:
            fleet = Fleet(bus, objects, settings)
            async with working(fleet):
                await Trainer(bus, objects, settings).train(until_depth=4)
                await until(lambda: second.finished)
        with pytest.raises(FencedError):
            await leading_first
        report = await audit(bus, Log(objects, run_name), settings)
    assert report.clean, report.lines()


async def test_an_ended_run_is_finished_at_once_and_goes_on_with_more_steps(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings, run={"name": run_name, "steps": 2})
    more = settings_for(run_name, bus_settings, file_store_settings, run={"name": run_name, "steps": 3})
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        async with working(Fleet(bus, objects, more)):
            async with leading(settings, bus, objects) as leader:
                await Trainer(bus, objects, settings).train(until_depth=2)
                await until(lambda: leader.finished)
            before = len(await records(bus))
            async with leading(settings, bus, objects) as leader:
                await until(lambda: leader.finished)
            added = (await records(bus))[before:]
            async with leading(more, bus, objects) as leader:
                await Trainer(bus, objects, more).train(until_depth=3)
                await until(lambda: leader.finished)
        report = await audit(bus, Log(objects, run_name), more)
        ends = [record for record in await records(bus) if isinstance(record, EndRecord)]
    assert [type(record) for record in added] == [WriterRecord]
    assert [end.depth for end in ends] == [2, 3]
    assert report.clean, report.lines()


async def test_a_restart_from_a_snapshot_is_a_restart_from_the_whole_stream(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings, buffer={
        "group_size": 2, "groups_per_batch": 2, "max_staleness": 1, "snapshot_every_records": 15})  # fmt: skip
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        async with working(Fleet(bus, objects, settings, fail_every=5)):
            async with leading(settings, bus, objects) as leader:
                await Trainer(bus, objects, settings).train(until_depth=4)
                await until(lambda: leader.finished)
        snapshots = [record for record in await records(bus) if isinstance(record, SnapshotRecord)]
        quick = await rebuild(bus, Blobs(objects, run_name))
        assert quick.outcome_sequence == snapshots[-1].outcome_cursor > 0
        whole = State()
        await read_control(bus, whole)
        for state in (quick, whole):
            await read_outcomes(bus, state)
        assert dump(quick) == dump(whole)
        await asyncio.to_thread(objects.put, f"{run_name}/blobs/{snapshots[-1].blob.hex()}", b"rot")
        rotten = await rebuild(bus, Blobs(objects, run_name))
        await read_outcomes(bus, rotten)
        assert dump(rotten) == dump(whole)
    assert len(snapshots) >= 2


async def test_a_fleet_that_vanishes_costs_its_groups_and_no_more(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings, eval={"every": 0}, buffer={
        "group_size": 2, "groups_per_batch": 1, "max_staleness": 0, "group_deadline_seconds": 0.5})  # fmt: skip
    async with connected(settings) as (bus, objects), leading(settings, bus, objects) as leader:
        await seed(objects, run_name)
        await until(lambda: leader.state.dropped.get("deadline", 0) >= 4)
        training = asyncio.create_task(Trainer(bus, objects, settings).train(until_depth=4))
        async with working(Fleet(bus, objects, settings)):
            await training
            await until(lambda: leader.finished)
        report = await audit(bus, Log(objects, run_name), settings)
        standing = await records(bus)
    assert report.clean, report.lines()
    dropped = {record.group for record in standing if isinstance(record, DropRecord)}
    cancelled = {record.group for record in standing if isinstance(record, CancelRecord)}
    assert dropped <= cancelled
    assert all(record.lane == TRAIN for record in standing if isinstance(record, DropRecord))


async def test_who_waits_for_whom_is_shown(run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings, eval={"every": 0})
    async with connected(settings) as (bus, objects), leading(settings, bus, objects) as leader:
        await seed(objects, run_name)
        await Trainer(bus, objects, settings).train(until_depth=0)
        await until(lambda: leader.looks["all"] >= 2)  # a trainer, no fleet: it waits for its first batch
        starved = leader.waiting()
        async with working(Fleet(bus, objects, settings)):
            await until(lambda: leader.state.next_depth == 2)  # all that the bound allows is batched, and nobody trains it
        before = leader.looks["producer_blocked"]
        await until(lambda: leader.looks["producer_blocked"] > before)
    assert starved["consumer_waiting_share"] == 1.0
    assert starved["producer_blocked_share"] == 0.0
    assert starved["oldest_open_seconds"] > 0.0
