"""Purging on a real bus and store: what goes, what stays, and that the run never notices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from live.buffer.harness import Fleet, Trainer, connected, leading, seed, settings_for, working
from support.waiting import until
from towline.audit.run import audit
from towline.buffer.dump import dump
from towline.buffer.janitor import Janitor
from towline.buffer.leftovers import Leftovers
from towline.buffer.replay import read_outcomes, rebuild
from towline.buffer.state import State
from towline.bus.topology import CONTROL, OUTCOME, PARTIAL, TRAJECTORY
from towline.config import BusSettings, Settings, StoreSettings
from towline.contract.entries import LogEntry, VersionEntry
from towline.contract.task import Task
from towline.store.blobs import Blobs
from towline.store.log import Log


class CheckpointingTrainer(Trainer):
    """Each second version names a checkpoint."""

    async def _append(self, make: Any) -> LogEntry:
        def with_checkpoint(log: Log, number: int, prev: str) -> LogEntry:
            entry: LogEntry = make(log, number, prev)
            if isinstance(entry, VersionEntry) and entry.depth % 2 == 0:
                fields = {name: getattr(entry, name) for name in entry.__struct_fields__}
                return VersionEntry(**(fields | {"checkpoint": f"c{entry.depth}"}))
            return entry

        return await super()._append(with_checkpoint)


def purging(run_name: str, bus_settings: BusSettings, store: StoreSettings, steps: int) -> Settings:
    return settings_for(run_name, bus_settings, store, run={"name": run_name, "steps": steps}, eval={"every": 0}, buffer={
        "group_size": 2, "groups_per_batch": 2, "max_staleness": 1, "snapshot_every_records": 12, "keep_history": False,
    })  # fmt: skip


async def acknowledge_rewards(bus: Any) -> None:
    """The scripted fleet scores by itself; the reward consumer's ack floor is moved as reward would. The fleet may go on
    meanwhile, so what it publishes is acknowledged too until nothing is left."""
    spec = bus.topology.reward_consumer()
    consumer = await bus.consumer(spec)

    async def taken() -> bool:
        for delivery in await consumer.fetch(256, 0.5):
            await delivery.ack()
        info = await bus.jetstream.call("look", f"CONSUMER.INFO.{spec.stream}.{spec.durable}")
        return bool(info["ack_floor"]["stream_seq"] >= (await bus.stream_state(TRAJECTORY)).last_sequence)

    await until(taken)
    await consumer.close()


async def settled(bus: Any, leader: Any) -> None:
    """The fleet has done all that pacing lets it do, and the buffer has read it: nothing moves under what is compared next."""

    async def lasts() -> list[int]:
        return [(await bus.stream_state(spec)).last_sequence for spec in (CONTROL, OUTCOME, TRAJECTORY)]

    async def still() -> bool:
        before = await lasts()
        await asyncio.sleep(0.7)
        read = [leader.state.control_sequence, leader.state.outcome_sequence]
        return before == await lasts() and before[:2] == read

    await until(still)


async def trained_and_scored(bus: Any, leader: Any, trainer: Trainer, *, depth: int, final: int) -> None:
    """The run is at `depth`, reward has acknowledged all there is, and batches below `final` are final."""
    await trainer.train(until_depth=depth)
    await settled(bus, leader)
    await acknowledge_rewards(bus)
    await until(lambda: leader.state.floor_depth >= final)


async def test_history_that_no_restart_needs_goes_and_the_audit_says_so(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("towline.buffer.janitor.JANITOR_SECONDS", 3600.0)  # only the sweeps that are asked for here
    settings = purging(run_name, bus_settings, file_store_settings, 20)
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        trainer = CheckpointingTrainer(bus, objects, settings)
        async with working(Fleet(bus, objects, settings, fail_every=9)):
            async with leading(settings, bus, objects) as leader:
                await trained_and_scored(bus, leader, trainer, depth=12, final=8)
                found = await leader.janitor.sweep()
                assert found is not None
                firsts = [(await bus.stream_state(spec)).first_sequence for spec in (CONTROL, OUTCOME, TRAJECTORY)]
                assert firsts == [found.control, found.outcome, found.trajectory]
                assert min(firsts) > 20
                assert min(b.for_depth for b in leader.state.batches.values() if b.groups) == leader.state.floor_depth
                live = dump(leader.state)
                again = await rebuild(bus, Blobs(objects, run_name))
                await read_outcomes(bus, again)
                assert dump(again) == live
                report = await audit(bus, Log(objects, run_name), settings)
            # A trainer that goes back to the older retained checkpoint finds every batch and trajectory that it needs.
            forking = asyncio.create_task(CheckpointingTrainer(bus, objects, settings).train(until_depth=20, base_depth=10))
            async with leading(settings, bus, objects) as leader:
                await forking
                await until(lambda: leader.finished)
        last = await audit(bus, Log(objects, run_name), settings)
        blobs = list(objects.list(f"{run_name}/blobs/"))
    assert report.clean, report.lines()
    assert report.purged == {"CONTROL": firsts[0] - 1, "OUTCOME": firsts[1] - 1, "TRAJECTORY": firsts[2] - 1}
    assert report.batches_purged > 0
    assert any(line.startswith("purged as final") for line in report.lines())
    assert last.clean, last.lines()
    assert last.finished
    assert last.depth == 20
    assert leader.janitor.blobs_deleted > 0 or len(blobs) < 20


class ComparingFleet(Fleet):
    """Scores a group once all of its trajectories are there, as reward does where the verifier compares. One sample is kept
    back."""

    def __init__(self, bus: Any, objects: Any, settings: Settings, kept_back: tuple[int, int]) -> None:
        super().__init__(bus, objects, settings)
        self.kept_back, self.release = kept_back, asyncio.Event()
        self.scores: dict[int, list[tuple[str, bytes]]] = {}
        self.later: asyncio.Task[None] | None = None

    async def publish(self, task: Task, task_sequence: int, version: int, *, reward: float | None = None) -> None:
        if (task.group, task.sample) == self.kept_back and self.later is None:
            self.later = asyncio.create_task(self._publish_later(task, task_sequence, version))
            return
        await super().publish(task, task_sequence, version, reward=reward)

    async def _publish_later(self, task: Task, task_sequence: int, version: int) -> None:
        await self.release.wait()
        await super().publish(task, task_sequence, version)

    async def score(self, task: Task, data: bytes) -> None:
        waiting = self.scores.setdefault(task.group, [])
        waiting.append((self.bus.topology.score(task.group, task.sample), data))
        if len(waiting) == task.group_size:
            for subject, one in waiting:
                await self.bus.create(subject, one)


async def test_what_reward_acknowledged_unscored_stays_until_its_group_is_scored(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier that compares scores a group with its last sample; the others, acknowledged before, stand nowhere else."""
    monkeypatch.setattr("towline.buffer.janitor.JANITOR_SECONDS", 3600.0)
    settings = purging(run_name, bus_settings, file_store_settings, 30)
    settings = settings.model_copy(update={"reward": settings.reward.model_copy(update={"scope": "group"})})
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        trainer = CheckpointingTrainer(bus, objects, settings)
        fleet = ComparingFleet(bus, objects, settings, kept_back=(2, 1))
        async with working(fleet), leading(settings, bus, objects) as leader:
            await trained_and_scored(bus, leader, trainer, depth=12, final=8)
            kept = await bus.last(TRAJECTORY, bus.topology.trajectory(2, 0))
            assert kept is not None
            assert leader.state.groups[2].scores == 0
            found = await leader.janitor.sweep()
            assert found is not None
            assert found.trajectory == kept.sequence == (await bus.stream_state(TRAJECTORY)).first_sequence
            assert kept.sequence > 1
            fleet.release.set()
            await until(lambda: 2 not in leader.state.groups or leader.state.groups[2].complete)
            await trained_and_scored(bus, leader, trainer, depth=16, final=12)
            found = await leader.janitor.sweep()
            assert found is not None
            assert found.trajectory > kept.sequence + 20


async def test_kept_history_is_never_purged(run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings, eval={"every": 0}, buffer={
        "group_size": 2, "groups_per_batch": 2, "snapshot_every_records": 10})  # fmt: skip
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        async with working(Fleet(bus, objects, settings)), leading(settings, bus, objects) as leader:
            await CheckpointingTrainer(bus, objects, settings).train(until_depth=4)
            await until(lambda: leader.finished)
            assert leader.state.floor_depth == 0
        firsts = [(await bus.stream_state(spec)).first_sequence for spec in (CONTROL, OUTCOME, TRAJECTORY)]
    assert firsts == [1, 1, 1]


async def test_partials_of_closed_groups_go_and_those_of_open_ones_stay(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings)
    async with connected(settings) as (bus, _):
        state = State()
        state.next_group = 8
        state.groups = dict.fromkeys((3, 5))
        leftovers = Leftovers(bus, lambda: state)
        for number in (0, 3, 5, 7, 8, 12):
            for sample in (0, 1):
                await bus.publish(bus.topology.partial(number, sample), b"so far")
        assert await leftovers.sweep() == 4, "groups 0 and 7, which were admitted and are closed"
        left = await bus.jetstream.subjects(bus.topology.stream(PARTIAL), bus.topology.subject("partial.>"))
        assert left == {bus.topology.partial(number, sample) for number in (3, 5, 8, 12) for sample in (0, 1)}
        assert await leftovers.sweep() == 0


async def test_nothing_goes_while_the_newest_snapshot_cant_be_read(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings
) -> None:
    settings = purging(run_name, bus_settings, file_store_settings, 4)
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        async with working(Fleet(bus, objects, settings)), leading(settings, bus, objects) as leader:
            await CheckpointingTrainer(bus, objects, settings).train(until_depth=4)
            await until(lambda: leader.finished)
        first = (await bus.stream_state(CONTROL)).first_sequence
        for info in list(objects.list(f"{run_name}/blobs/")):
            objects.put(info.key, b"rot")
        assert await Janitor(bus, objects, lambda: leader.state).sweep() is None
        assert (await bus.stream_state(CONTROL)).first_sequence == first
