"""What home's buffer does at a site: purges there what home needs no more, and nothing else, and fits the site's lane."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from live.buffer.harness import SLOTS, Fleet, connected, leading, seed, settings_for, trajectory_of, working
from live.buffer.test_janitor import CheckpointingTrainer
from live.sites.pair import SITE, Pair, pair
from support.taken import newest_taken
from support.waiting import until
from towline.audit.run import audit
from towline.buffer.far import FarKeeper, Taken
from towline.buffer.presence import Presence
from towline.buffer.state import State
from towline.bus.across import Across
from towline.bus.client import Bus
from towline.bus.origins import way_of
from towline.bus.topology import CONTROL, DEAD, PARTIAL, REPLICAS, TRAJECTORY, StreamSpec
from towline.config import StoreSettings
from towline.contract.codec import digest, encode
from towline.contract.entries import LogEntry
from towline.contract.outcome import Score
from towline.contract.policy import ReplicaInfo
from towline.contract.task import Task, VersionSpan
from towline.contract.trajectory import decode_trajectory, encode_trajectory
from towline.errors import UnavailableError
from towline.store.log import Log


@pytest.fixture
async def two(tmp_path: Path, run_name: str) -> AsyncIterator[Pair]:
    async with pair(tmp_path, run_name) as made:
        await made.prepare()
        yield made


async def count(bus: Bus, spec: StreamSpec, wanted: int) -> None:
    async def reached() -> bool:
        return (await bus.stream_state(spec)).messages >= wanted

    await until(reached)


async def first(bus: Bus, spec: StreamSpec) -> int:
    return (await bus.stream_state(spec)).first_sequence


async def subjects(bus: Bus, spec: StreamSpec) -> list[str]:
    return [bus.topology.relative(message.subject) async for message in bus.read(spec, follow=False)]


def keeper(
    bus: Bus, taken: Taken, *, slots: int = 0, next_group: int = 0, control_floor: int = 1, state: State | None = None
) -> FarKeeper:
    state = state or State()
    state.next_group = next_group
    return FarKeeper(
        bus, lambda: state, lambda: Presence({SITE: slots}), taken, lambda: control_floor, ack_wait_seconds=3.0,
        keep_history=False,
    )  # fmt: skip


async def purge(bus: Bus, spec: StreamSpec, floor: int) -> None:
    await bus.jetstream.call("purge", f"STREAM.PURGE.{bus.topology.stream(spec)}", {"seq": floor})


async def test_the_site_keeps_what_home_keeps_and_what_home_has_not_got(two: Pair) -> None:
    async with two.buses("buffer", "rollout-worker") as (buffer, site), two.buses("rollout-worker", "viewer") as (home, far):
        names, taken = buffer.topology, Taken(buffer)
        for number in range(6):
            await site.create(names.trajectory(number, 0), b"%d" % number)
            await count(buffer, TRAJECTORY, 2 * number + 1)
            await home.create(names.trajectory(number, 1), b"home's %d" % number)
        assert await taken.note(TRAJECTORY, 1, 8) == 8  # home's first seven: the site's 0 to 3, three of its own
        created = (await far.stream_state(TRAJECTORY)).created_at
        assert taken.of(SITE, TRAJECTORY, way_of(f"sync-{SITE}", created)) == 4
        assert taken.of(SITE, TRAJECTORY, way_of(f"sync-{SITE}_1", created)) == 0
        await purge(buffer, TRAJECTORY, 8)
        two.cut()
        await site.create(names.trajectory(8, 0), b"made while cut")
        watching = keeper(buffer, taken)
        await watching.round()
        assert await first(far, TRAJECTORY) == 1, "the line is cut"
        two.heal()
        await count(buffer, TRAJECTORY, 6)

        async def purged() -> bool:
            await watching.round()
            return await first(far, TRAJECTORY) == 5

        await until(purged)
        assert await subjects(far, TRAJECTORY) == ["trajectory.4.0", "trajectory.5.0", "trajectory.8.0"]
        assert sorted(await subjects(buffer, TRAJECTORY)) == sorted(
            ["trajectory.3.1", "trajectory.4.0", "trajectory.4.1", "trajectory.5.0", "trajectory.5.1", "trajectory.8.0"]
        )


async def test_control_dead_letters_and_partials_go_at_the_site_too(two: Pair) -> None:
    async with two.buses("buffer", "rollout-worker") as (buffer, site), two.buses("viewer", "viewer") as (see, far):
        names = buffer.topology
        for number in range(8):
            await buffer.publish(names.task("train", site=SITE), b"%d" % number)
        await site.dead("rollout", b"nobody could read this", "a reason")
        for group, sample in ((2, 0), (2, 1), (7, 0), (12, 0)):
            await site.publish(names.partial(group, sample), b"half a sample")
        await count(far, CONTROL, 8)
        await count(see, DEAD, 1)
        watching = keeper(buffer, Taken(buffer), next_group=10, control_floor=6)

        async def swept() -> bool:  # what home has it confirms within a second
            await watching.round()
            return (await far.stream_state(DEAD)).messages == 0

        await until(swept)
        assert await first(far, CONTROL) == 6
        assert (await see.stream_state(DEAD)).messages == 1, "home keeps it, for people"
        assert await subjects(far, PARTIAL) == ["partial.12.0"], "a group that home hasn't heard of may be under way"
        await buffer.publish(names.task("train", site=SITE), b"after the purge")
        await count(far, CONTROL, 4)
        assert [m.sequence async for m in far.read(CONTROL, follow=False)] == [6, 7, 8, 9]


async def test_a_site_that_lost_its_disk_keeps_what_it_makes_anew_until_home_has_it(two: Pair) -> None:
    """It counts from 1 again, below what home took in of it before."""
    async with two.buses("buffer", "rollout-worker") as (buffer, site):
        names, taken = buffer.topology, Taken(buffer)
        for number in range(6):
            await site.create(names.trajectory(number, 0), b"%d" % number)
        await count(buffer, TRAJECTORY, 6)
        await taken.note(TRAJECTORY, 1, 6)
        await purge(buffer, TRAJECTORY, 6)
        await two.servers[SITE].stop(9)
        shutil.rmtree(two.folder / "site")
        await two.servers[SITE].start()
        await two.prepare()
        watching = keeper(buffer, taken)
        for number in (10, 11, 12):
            await site.create(names.trajectory(number, 0), b"%d" % number)

        async def there() -> bool:
            await watching.round()
            return await subjects(buffer, TRAJECTORY) == [f"trajectory.{number}.0" for number in (5, 10, 11, 12)]

        await until(there, 60.0)


async def test_the_sites_lane_follows_its_replicas_and_loses_nothing_by_it(two: Pair) -> None:
    async with two.buses("buffer", "rollout-worker") as (buffer, site):
        names = site.topology
        for number in range(12):
            await buffer.publish(names.task("train", site=SITE), b"%d" % number)
        await count(site, CONTROL, 12)
        lane = await site.consumer(names.lane_consumer("train", 1))
        taken = Taken(buffer)
        await keeper(buffer, taken, slots=2).round()
        await keeper(buffer, taken, slots=0).round()
        assert await max_ack_pending(site) == 4, "nothing is heard of the site: it stays as it was"
        held = await lane.fetch(12, 1.0)
        assert len(held) == 4
        await keeper(buffer, taken, slots=5).round()
        assert await max_ack_pending(site) == 10
        more = await lane.fetch(12, 5.0)
        assert len(held) + len(more) == 10
        assert len({delivery.sequence for delivery in (*held, *more)}) == 10
        await lane.close()


async def max_ack_pending(bus: Bus) -> int:
    spec = bus.topology.lane_consumer("train", 1)
    return int((await bus.jetstream.call("look", f"CONSUMER.INFO.{spec.stream}.{spec.durable}"))["config"]["max_ack_pending"])


@pytest.mark.slow
async def test_homes_server_starts_anew_after_all_was_purged_and_takes_in_exactly_what_it_had_not(two: Pair) -> None:
    async with two.buses("buffer", "rollout-worker") as (buffer, site):
        names = buffer.topology
        for number in range(5):
            await site.create(names.trajectory(number, 0), b"%d" % number)
        await count(buffer, TRAJECTORY, 5)
        await purge(buffer, TRAJECTORY, 6)
        two.cut()
        for number in range(5, 9):
            await site.create(names.trajectory(number, 0), b"%d" % number)
        await two.servers["home"].stop(9)
        await two.servers["home"].start()
        two.heal()
        await count(buffer, TRAJECTORY, 4)
        await site.create(names.trajectory(9, 0), b"and one after")
        await until(lambda: _last(buffer, names.trajectory(9, 0)))
        assert await subjects(buffer, TRAJECTORY) == [f"trajectory.{number}.0" for number in range(5, 10)]
        origins, after = await newest_taken(buffer.jetstream, names.stream(TRAJECTORY), [SITE], start=1)
        assert (origins, after) == ({SITE: 10}, 11)


async def _last(bus: Bus, subject: str) -> bool:
    return await bus.last(TRAJECTORY, subject) is not None


@pytest.mark.slow
async def test_a_site_that_is_cut_off_is_said_to_be_away_within_seconds(two: Pair) -> None:
    async with two.buses("buffer", "viewer") as (buffer, _):
        across = Across(buffer.connection, SITE)
        assert await across.bounds(buffer.topology.stream(CONTROL)) == (1, 0), "the line is up, and nothing was sent yet"
        two.cut()

        async def away() -> bool:
            try:
                await across.bounds(buffer.topology.stream(CONTROL))
            except UnavailableError:
                return True
            return False

        await until(away)


class Side(Fleet):
    """Workers alone, of one side; `made`: the samples that it published."""

    def __init__(self, bus: Bus, *rest: object, site: str = "") -> None:
        super().__init__(bus, *rest, fail_every=9)  # type: ignore[arg-type]
        self.site, self.name, self.made = site, f"w-{site}", set[tuple[int, int]]()

    async def _register(self) -> None:
        while True:
            latest = self.log.lineage.latest if self.log.next_number else None
            info = ReplicaInfo(replica=self.name, host="h", engine="scripted", slots=SLOTS, busy=0, state="serving",
                               version=latest, at=time.time(), site=self.site)  # fmt: skip
            await self.bus.kv(REPLICAS).put(self.name, encode(info))
            await asyncio.sleep(0.5)

    async def publish(self, task: Task, task_sequence: int, version: int, *, reward: float | None = None) -> None:
        data = encode_trajectory(trajectory_of(task, task_sequence, version))
        if (await self.bus.create(self.bus.topology.trajectory(task.group, task.sample), data)).won:
            self.made.add((task.group, task.sample))


class Unhurried(CheckpointingTrainer):
    """Steps that leave both sides the time for their share."""

    async def _append(self, make: Any) -> LogEntry:
        await asyncio.sleep(0.1)
        return await super()._append(make)


async def judge(bus: Bus, run: str, seen: set[tuple[int, int]]) -> None:
    """Reward, at home: scores whatever arrives there, and acks it."""
    consumer = await bus.consumer(bus.topology.reward_consumer())
    while True:
        for delivery in await consumer.fetch(256, 5.0):
            one = decode_trajectory(delivery.data)
            seen.add((one.group, one.sample))
            score = Score(
                run=run, lane=one.lane, group=one.group, sample=one.sample, group_size=one.group_size,
                task_sequence=one.task_sequence, trajectory_sequence=delivery.sequence, trajectory_digest=digest(delivery.data),
                reward=0.5, verifier="scripted", policy_tokens=2, total_tokens=4,
                version_spans=(VersionSpan(2, 4, one.version_spans[0].version, "start"),), finish="stop",
            )  # fmt: skip
            await bus.create(bus.topology.score(one.group, one.sample), encode(score))
            await delivery.ack()


async def test_a_long_run_of_two_sites_fits_into_streams_that_hold_a_part_of_it(
    tmp_path: Path, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cut in it: no sample is lost, and both sides' streams are bounded by what is open."""
    monkeypatch.setattr("towline.buffer.janitor.JANITOR_SECONDS", 0.3)
    monkeypatch.setattr("towline.buffer.far.FAR_SECONDS", 0.3)
    store = StoreSettings(url=(tmp_path / "store").as_uri())
    async with pair(tmp_path, run_name, roles=False) as two:
        await two.prepare()
        settings = settings_for(run_name, two.home, store, run={"steps": 24}, eval={"every": 0}, buffer={
            "group_size": 2, "groups_per_batch": 4, "max_staleness": 2, "snapshot_every_records": 12, "keep_history": False,
        })  # fmt: skip
        async with connected(settings) as (bus, objects), two.buses() as (home, site):
            await seed(objects, run_name)
            seen = set[tuple[int, int]]()
            judging = asyncio.create_task(judge(home, run_name, seen))
            far = Side(site, objects, settings, site=SITE)
            near = Side(home, objects, settings)
            async with working(near), working(far), leading(settings, bus, objects) as leader:
                await until(lambda: SITE in leader.fleet.presence.slots)
                await Unhurried(home, objects, settings).train(until_depth=2)
                await until(lambda: far.made & seen)  # home takes the site's samples in
                await Unhurried(home, objects, settings).train(until_depth=10)
                two.cut()
                await Unhurried(home, objects, settings).train(until_depth=14)
                two.heal()
                await Unhurried(home, objects, settings).train(until_depth=24)
                await until(lambda: leader.finished)
                await until(lambda: far.made | near.made <= seen)

                async def same() -> bool:
                    at_home = {subject for subject in await subjects(bus, TRAJECTORY) if _by_far(subject, far)}
                    return set(await subjects(site, TRAJECTORY)) == at_home

                await until(same)
                await until(lambda: _purged(site, CONTROL, leader.janitor.control_floor))
            judging.cancel()
            await asyncio.gather(judging, return_exceptions=True)
            report = await audit(bus, Log(objects, run_name), settings)
            kept = (await site.stream_state(TRAJECTORY)).messages
            info = await bus.jetstream.call("look", f"STREAM.INFO.{bus.topology.stream(TRAJECTORY)}")
            assert info["config"]["sources"][0]["consumer"]["name"] == f"sync-{SITE}", (
                "a site that lost nothing was taken in anew"
            )
            assert leader.far.trouble == ""
    assert report.clean, report.lines()
    assert report.finished
    assert kept < len(far.made), "the site's stream holds all that was ever made there"


async def _purged(bus: Bus, spec: StreamSpec, floor: int) -> bool:
    return 1 < floor == await first(bus, spec)


def _by_far(subject: str, far: Side) -> bool:
    group, sample = subject.split(".")[1:]
    return (int(group), int(sample)) in far.made
