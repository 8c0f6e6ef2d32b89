"""A site's nats-server comes back without its last writes, and gives their sequences out again: nothing that it makes is lost."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from live.sites.pair import SITE, Pair, pair
from live.sites.test_far import count, first, keeper, purge, subjects
from support.waiting import until
from towline.access.nats import permissions
from towline.access.roles import BUFFER, ROLES
from towline.buffer.far import FarKeeper, Taken
from towline.buffer.groups import Group, Sample
from towline.buffer.state import State
from towline.buffer.tails import QUIET_SECONDS
from towline.bus.client import Bus
from towline.bus.sites import sync_names
from towline.bus.topology import CONTROL, DEAD, REPLICAS, TRAJECTORY, Topology
from towline.contract.codec import encode
from towline.contract.outcome import Failure
from towline.contract.task import TRAIN
from towline.errors import UnavailableError


@pytest.fixture
async def two(tmp_path: Path, run_name: str) -> AsyncIterator[Pair]:
    async with pair(tmp_path, run_name) as made:
        await made.prepare()
        yield made


@contextlib.asynccontextmanager
async def older(two: Pair) -> AsyncIterator[None]:
    """What the site's server is given within is lost again at the end; it's up on both sides of this."""
    server, folder = two.servers[SITE], two.folder / "older"
    await server.stop()
    shutil.copytree(two.folder / "site", folder)
    await server.start()
    yield
    await server.stop(9)
    shutil.rmtree(two.folder / "site")
    folder.rename(two.folder / "site")
    await asyncio.sleep(QUIET_SECONDS)  # no machine that lost its writes is back sooner
    await server.start()


async def made(site: Bus, *numbers: int) -> None:
    for number in numbers:
        assert (await site.create(site.topology.trajectory(number, 0), b"%d" % number)).won


async def all_there(home: Bus, watching: FarKeeper, numbers: range | list[int]) -> None:
    """Home has a trajectory of each, with rounds of the buffer until it has."""
    wanted = {f"trajectory.{number}.0" for number in numbers}

    async def there() -> bool:
        await watching.round()
        return wanted <= set(await subjects(home, TRAJECTORY))

    await until(there, 60.0)


async def test_what_comes_under_numbers_that_home_has_had_is_ignored_by_the_servers_alone(two: Pair) -> None:
    """Why home's buffer looks: were this to fail, nats-server sees to it itself."""
    async with two.buses("viewer", "rollout-worker") as (home, site):
        await made(site, *range(4))
        await count(home, TRAJECTORY, 4)
        async with older(two):
            await made(site, *range(4, 8))
            await count(home, TRAJECTORY, 8)
        await made(site, *range(10, 16))
        await count(home, TRAJECTORY, 10)
        found = await subjects(home, TRAJECTORY)
        assert found == [f"trajectory.{number}.0" for number in (*range(8), 14, 15)]


@pytest.mark.parametrize("overtaken", [False, True], ids=["shorter", "overtaken"])
@pytest.mark.parametrize("known", [False, True], ids=["new_buffer", "same_buffer"])
async def test_what_a_site_makes_under_old_numbers_comes_home_and_stays_at_the_site_until_then(
    two: Pair, overtaken: bool, known: bool
) -> None:
    async with two.buses("buffer", "rollout-worker") as (home, site), two.buses("viewer", "viewer") as (_, far):
        taken = Taken(home)
        watching = keeper(home, taken)
        await made(site, *range(4))
        await count(home, TRAJECTORY, 4)
        if known:
            await watching.round()
        async with older(two):
            await made(site, *range(4, 8))
            await count(home, TRAJECTORY, 8)
            if known:
                await watching.round()
        numbers = range(10, 20 if overtaken else 12)
        await made(site, *numbers)
        if overtaken:
            await until(lambda: _has(home, 19))
        await taken.note(TRAJECTORY, 1)  # home needs none of them any more, and says so before it purges
        assert watching.trouble == ""
        await watching.round()
        assert watching.trouble.startswith("site_regressed: TRAJECTORY at b lost messages")
        assert await first(far, TRAJECTORY) == 1, "nothing of it may go before home has it"
        await all_there(home, watching, numbers)
        await made(site, *range(20, 24))
        await all_there(home, watching, range(20, 24))
        await until(lambda: _calm(watching))
        by = [source["consumer"]["name"] for source in (await _config(home))["sources"]]
        assert by == [sync_names(SITE)[1]], "once is enough"
        assert len(await subjects(home, TRAJECTORY)) <= 8 + 4 + 2 * len(numbers) + 4 + 4
        end = (await home.stream_state(TRAJECTORY)).last_sequence
        await taken.note(TRAJECTORY, 1, end)
        await purge(home, TRAJECTORY, end)

        async def gone() -> bool:
            await watching.round()
            return await subjects(far, TRAJECTORY) == ["trajectory.23.0"]

        await until(gone)


async def _has(bus: Bus, number: int) -> bool:
    return await bus.last(TRAJECTORY, bus.topology.trajectory(number, 0)) is not None


async def _calm(watching: FarKeeper) -> bool:
    await watching.round()
    return not watching.trouble


async def _config(bus: Bus) -> dict[str, list[dict[str, dict[str, str]]]]:
    info = await bus.jetstream.call("look", f"STREAM.INFO.{bus.topology.stream(TRAJECTORY)}")
    return dict(info["config"])


async def test_init_leaves_what_took_the_place_and_a_site_may_lose_its_last_writes_again(two: Pair) -> None:
    async with two.buses("buffer", "rollout-worker") as (home, site):
        watching = keeper(home, Taken(home))
        for turn in (0, 100):
            await made(site, turn)
            await all_there(home, watching, [turn])
            async with older(two):
                await made(site, turn + 1, turn + 2)
                await all_there(home, watching, [turn + 1, turn + 2])
            await two.prepare()
            await made(site, turn + 10)
            await all_there(home, watching, [turn + 10])
        assert [source["consumer"]["name"] for source in (await _config(home))["sources"]] == [sync_names(SITE)[2]]


async def test_a_sites_registry_and_dead_letters_of_an_older_copy_come_home_too(two: Pair) -> None:
    async with two.buses("buffer", "rollout-worker") as (home, site), two.buses("viewer", "viewer") as (see, _):
        watching = keeper(home, Taken(home))
        await site.kv(REPLICAS).put("far", b"0")
        await site.dead("rollout", b"0", "a reason")
        await count(see, DEAD, 1)
        async with older(two):
            for number in range(1, 6):
                await site.kv(REPLICAS).put("far", b"%d" % number)
                await site.dead("rollout", b"%d" % number, "a reason")
            await count(see, DEAD, 6)
            await until(lambda: _registered(see, b"5"))
        await site.kv(REPLICAS).put("far", b"anew")
        await site.dead("rollout", b"anew", "a reason")

        async def there() -> bool:
            await watching.round()
            dead = [message.data async for message in see.read(DEAD, follow=False)]
            return b"anew" in dead and await _registered(see, b"anew")

        await until(there, 60.0)


async def _registered(bus: Bus, value: bytes) -> bool:
    return await bus.kv(REPLICAS).get("far") == value


class Issued:
    """Groups of one sample for the site's workers, each told of by a record in CONTROL."""

    def __init__(self, home: Bus) -> None:
        self.home, self.state = home, State()

    async def issue(self, *groups: int) -> None:
        for group in groups:
            sequence = await self.home.publish(self.home.topology.task(TRAIN, site=SITE), b"%d" % group)
            sample = Sample(task_sequence=sequence, not_before_depth=0, attempt=0, seed=0, site=SITE)
            self.state.groups[group] = Group(group, TRAIN, 1, 0.0, None, None, [sample])

    @property
    def again(self) -> set[int]:
        return {group for group, _ in self.state.lost}


async def test_a_task_that_only_lost_records_told_the_site_of_is_issued_again(two: Pair) -> None:
    """The site's copy of CONTROL goes on after what home had sent it before, and never gets what lies between."""
    async with two.buses("buffer", "rollout-worker") as (home, site), two.buses("viewer", "viewer") as (_, far):
        issued = Issued(home)
        watching = keeper(home, Taken(home), state=issued.state)
        await issued.issue(0)
        await count(far, CONTROL, 1)
        async with older(two):
            await issued.issue(1, 2, 3, 4)
            await count(far, CONTROL, 5)
            await made(site, 2)
            await until(lambda: _has(home, 2))
            await until(lambda: _confirmed(home, 5))
        await issued.issue(5)
        await until(lambda: _ends_at(far, 6))
        assert [message.sequence async for message in far.read(CONTROL, follow=False)] == [1, 6]
        await watching.round()
        assert issued.again == {1, 3, 4}, "home has the second's trajectory"


async def test_what_a_sites_workers_were_done_with_and_is_nowhere_is_issued_again_once_the_line_is_back(two: Pair) -> None:
    """Their acks stood on the site's disk, what they acked didn't yet, and the line was cut."""
    async with two.buses("buffer", "rollout-worker") as (home, site), two.buses("viewer", "viewer") as (_, far):
        issued, names = Issued(home), home.topology
        watching = keeper(home, Taken(home), state=issued.state)
        await watching.round()
        await issued.issue(*range(6))
        await count(far, CONTROL, 6)
        lane = await site.consumer(site.topology.lane_consumer(TRAIN, 8))
        held = await lane.fetch(4, 5.0)
        await made(site, 0)
        await until(lambda: _has(home, 0))
        two.cut()
        await made(site, 1)
        failed = Failure(
            run=two.run, lane=TRAIN, group=2, sample=0, task_sequence=held[2].sequence, delivery=1, stage="generate", reason="e",
            replica="w",
        )  # fmt: skip
        await site.publish(names.failure(2, 0), encode(failed))
        for delivery in held:
            await delivery.ack()
        await watching.round()
        assert issued.again == set(), "the line is cut"
        two.heal()

        async def back() -> bool:
            await watching.round()
            return bool(issued.again)

        await until(back)
        assert issued.again == {3}, "of the others there is a trajectory, or a failure, or they are still to be made"
        await lane.close()


async def _confirmed(bus: Bus, sequence: int) -> bool:
    stream = bus.topology.stream(CONTROL)
    state = await bus.jetstream.call("look", f"CONSUMER.INFO.{stream}.{sync_names(SITE)[0]}")
    return bool(state["ack_floor"]["stream_seq"] >= sequence)


async def _ends_at(bus: Bus, sequence: int) -> bool:
    return (await bus.stream_state(CONTROL)).last_sequence == sequence


@pytest.mark.slow
async def test_when_no_consumer_is_left_the_state_says_so_and_nothing_goes_at_the_site(two: Pair) -> None:
    async with two.buses("buffer", "rollout-worker") as (home, site), two.buses("viewer", "viewer") as (_, far):
        taken = Taken(home)
        watching, last = keeper(home, taken), len(sync_names(SITE))
        for turn in range(last):
            await made(site, 100 * turn)
            await all_there(home, watching, [100 * turn])
            async with older(two):
                await made(site, 100 * turn + 1, 100 * turn + 2)
                await all_there(home, watching, [100 * turn + 1, 100 * turn + 2])
            await made(site, 100 * turn + 10)
            if turn < last - 1:
                await all_there(home, watching, [100 * turn + 10])
        with contextlib.suppress(UnavailableError):
            await watching.round()
        await taken.note(TRAJECTORY, 1)
        await watching.round()
        assert watching.trouble.startswith("site_regressed: ")
        assert "another name" in watching.trouble
        assert await first(far, TRAJECTORY) == 1


def test_the_consumers_that_may_follow_are_kept_from_whoever_reads_at_home() -> None:
    """Who made one there could say what home takes for the site's word."""
    topology = Topology("run")
    stream = topology.stream(TRAJECTORY)
    for role in ROLES:
        granted = permissions(role, ["run"], [SITE])
        for name in sync_names(SITE)[1:]:
            made_at_home = f"$JS.API.CONSUMER.CREATE.{stream}.{name}"
            wild = f"$JS.API.CONSUMER.CREATE.{stream}.*"
            assert made_at_home not in granted.publish
            assert wild not in granted.publish or made_at_home in granted.publish_deny, role
            assert (f"$JS.{SITE}.API.CONSUMER.CREATE.{stream}.{name}" in granted.publish) == (role == BUFFER)
