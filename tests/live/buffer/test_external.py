"""Groups from outside on a real bus: admitted once or turned away, across a killed buffer, an unreadable sample and an audit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

from live.buffer.harness import Fleet, Trainer, connected, leading, records, seed, settings_for, working
from support.waiting import until
from towline.audit.run import audit
from towline.buffer.dump import dump
from towline.buffer.replay import read_outcomes, rebuild
from towline.config import BusSettings, StoreSettings
from towline.contract.codec import encode
from towline.contract.control import AdmitRecord, BatchRecord, DropRecord, TaskRecord
from towline.contract.groups import EXTERNAL, external_group, is_external
from towline.contract.outcome import Failure
from towline.contract.task import Cursor, PromptRef, SamplingParams, Task, pack_tokens
from towline.store.blobs import Blobs
from towline.store.log import Log

SIZE = 3


@dataclass
class Outsider:
    """Sends groups of three, sampled by whatever version is the newest, one after the other."""

    fleet: Fleet
    sent: list[int] = field(default_factory=list)

    async def send(self, *, leave_out: int | None = None) -> int:
        group = external_group(f"session-{len(self.sent)}")
        self.sent.append(group)
        await self.fleet.refresh()
        for sample in range(SIZE):
            if sample != leave_out:
                await self.fleet.publish(self.task(group, sample), 0, self.fleet.log.lineage.latest)
        return group

    def task(self, group: int, sample: int) -> Task:
        return Task(
            run=self.fleet.run, lane=EXTERNAL, group=group, sample=sample, group_size=SIZE, prompt=pack_tokens([3, 1]),
            prompt_ref=PromptRef("outside", 0, 0), cursor=Cursor(0, 0), sampling=SamplingParams(max_tokens=4), seed=sample,
            not_before_depth=0, admitted_at=time.time(), deadline=1e12,
        )  # fmt: skip

    async def keep_sending(self) -> None:
        while True:
            await self.send()
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def sending(outsider: Outsider) -> None:  # type: ignore[misc]
    task = asyncio.create_task(outsider.keep_sending())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_run_half_of_whose_groups_come_from_outside_is_whole_across_restarts(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings, run={"name": run_name, "steps": 6}, buffer={
        "group_size": 2, "groups_per_batch": 2, "max_staleness": 1, "external_groups": 1,
        "snapshot_every_records": 25})  # fmt: skip
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        trainer, fleet = Trainer(bus, objects, settings), Fleet(bus, objects, settings)
        training = asyncio.create_task(trainer.train(until_depth=6))
        async with working(fleet), sending(Outsider(Fleet(bus, objects, settings))):
            for batches in (2, 4):
                async with leading(settings, bus, objects):
                    await until(lambda wanted=batches: len(trainer.batches) >= wanted)  # type: ignore[misc]
            async with leading(settings, bus, objects) as leader:
                await training
                await until(lambda: leader.finished)
        async with leading(settings, bus, objects) as leader:  # whatever was still on its way
            await until(lambda: leader.finished)
            live = dump(leader.state)
        report = await audit(bus, Log(objects, run_name), settings)
        rebuilt = await rebuild(bus, Blobs(objects, run_name))
        await read_outcomes(bus, rebuilt)
        standing = await records(bus)
    assert report.clean, report.lines()
    batches_of = [record for record in standing if isinstance(record, BatchRecord)]
    trained = {row.group for batch in batches_of for row in batch.rows}
    assert {is_external(group) for group in trained} == {False, True}
    assert report.counts.trained == sum(SIZE if is_external(group) else 2 for group in trained)
    admitted = {record.group for record in standing if isinstance(record, AdmitRecord)}
    dropped = {record.group for record in standing if isinstance(record, DropRecord)}
    assert report.counts.turned_away
    assert not (admitted & {group for group in dropped if not live_drop(standing, group)})
    assert (dump(rebuilt).groups, dump(rebuilt).closed_external) == (live.groups, live.closed_external)


def live_drop(standing: list[object], group: int) -> bool:
    """Whether the group's drop is one of an admitted group."""
    return any(isinstance(r, DropRecord) and r.group == group and r.samples > 0 for r in standing)


async def test_one_that_cant_be_verified_or_comes_unasked_where_nobody_is_asked_is_turned_away_by_name(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings)
    closed = settings_for(run_name, bus_settings, file_store_settings, buffer={
        "group_size": 2, "groups_per_batch": 2, "max_staleness": 1, "external": "drop"})  # fmt: skip
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        await Trainer(bus, objects, settings).train(until_depth=0)
        outsider = Outsider(Fleet(bus, objects, settings))
        async with leading(settings, bus, objects) as leader:
            half = await outsider.send(leave_out=1)
            await until(lambda: half in leader.state.offers)
            failure = Failure(run=run_name, lane="", group=half, sample=1, task_sequence=0, delivery=3, stage="malformed",
                              final=True, reason="no trajectory", replica="reward.0")  # fmt: skip
            await bus.publish(bus.topology.failure(half, 1), encode(failure))
            await until(lambda: half in leader.state.closed_external)
        async with leading(closed, bus, objects) as leader:
            whole = await outsider.send()
            await until(lambda: whole in leader.state.closed_external)
            await until(lambda: leader.state.late + leader.state.turned_away["unpaced"] == SIZE)
            offered = leader.state.turned_away["unpaced"]
        report = await audit(bus, Log(objects, run_name), settings)
        standing = await records(bus)
    drops = [(r.group, r.reason, r.offered) for r in standing if isinstance(r, DropRecord)]
    assert drops == [(half, "malformed", 2), (whole, "unpaced", offered)]
    assert report.clean, report.lines()
    assert report.counts.turned_away == {"malformed": 2, "unpaced": offered}
    assert [record for record in standing if isinstance(record, AdmitRecord)] == []
    assert sum(isinstance(record, TaskRecord) and record.task.lane == "train" for record in standing) == report.counts.open - 3
