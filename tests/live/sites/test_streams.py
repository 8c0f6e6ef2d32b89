"""What crosses between two sites, once, and what doesn't: real servers with every role's permissions, a line that can be cut."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from live.sites.pair import SITE, Pair, pair, settings_of
from support.waiting import until
from towline.access.identity import bus_as
from towline.access.init import prepare_bus
from towline.bus.client import Bus
from towline.bus.topology import CONTROL, LEASES, OUTCOME, POLICY, REPLICAS, TRAJECTORY, StreamSpec
from towline.config import StoreSettings
from towline.errors import MissingError, UsageError
from towline.store.blobs import Blobs
from towline.store.objects import open_store

TRAIN = "train"


@pytest.fixture
async def two(tmp_path: Path, run_name: str) -> AsyncIterator[Pair]:
    async with pair(tmp_path, run_name) as made:
        await made.prepare()
        yield made


async def subjects(bus: Bus, spec: StreamSpec) -> list[tuple[str, bytes]]:
    return [(bus.topology.relative(message.subject), message.data) async for message in bus.read(spec, follow=False)]


async def there(bus: Bus, spec: StreamSpec, count: int) -> None:
    async def reached() -> bool:
        return (await bus.stream_state(spec)).messages >= count

    await until(reached)


async def pending(bus: Bus) -> tuple[int, int]:
    """(delivered and unacked, not delivered) of lane train's consumer on this side."""
    spec = bus.topology.lane_consumer(TRAIN, 1)
    info = await bus.jetstream.call("look", f"CONSUMER.INFO.{spec.stream}.{spec.durable}")
    return info["num_ack_pending"], info["num_pending"]


async def test_init_makes_nothing_on_the_other_sides_server(tmp_path: Path, run_name: str) -> None:
    async with pair(tmp_path, run_name) as fresh:
        for bus, other in ((fresh.home, fresh.site), (fresh.site, fresh.home)):
            with pytest.raises(UsageError, match=r"has JetStream domain '\w+', not '\w+': correct bus\.url or bus\.site"):
                await prepare_bus(settings_of(run_name, bus.model_copy(update={"url": other.url})))
        await fresh.prepare()


async def test_init_can_be_repeated_on_both_sides_and_a_site_has_only_what_it_needs(two: Pair) -> None:
    await two.prepare()
    async with two.buses("viewer", "viewer") as (home, site):
        control = await site.jetstream.call("look", f"STREAM.INFO.{site.topology.stream(CONTROL)}")
        assert "subjects" not in control["config"]
        assert control["config"]["mirror"]["external"]["api"] == "$JS.home.API"
        with pytest.raises(MissingError):
            await site.jetstream.stream_state(f"KV_{site.topology.bucket(LEASES)}")
        gathered = await home.jetstream.call("look", f"STREAM.INFO.{home.topology.stream(OUTCOME)}")
        assert [source["external"]["api"] for source in gathered["config"]["sources"]] == [f"$JS.{SITE}.API"]


async def test_a_task_goes_to_its_side_alone_under_the_same_number_and_an_ack_counts_only_there(two: Pair) -> None:
    async with two.buses("buffer", "viewer") as (buffer, looking), two.buses("rollout-worker", "rollout-worker") as (home, site):
        here, far = home.topology.task(TRAIN), home.topology.task(TRAIN, site=SITE)
        sent = [await buffer.publish(subject, subject.encode()) for subject in (here, far, here, far)]
        await there(site, CONTROL, 4)
        at_home = await home.consumer(home.topology.lane_consumer(TRAIN, 4))
        at_site = await site.consumer(site.topology.lane_consumer(TRAIN, 4))
        mine, theirs = await at_home.fetch(9, 5.0), await at_site.fetch(9, 5.0)
        assert [delivery.sequence for delivery in mine] == [sent[0], sent[2]]
        assert [delivery.sequence for delivery in theirs] == [sent[1], sent[3]]
        assert {delivery.data for delivery in theirs} == {far.encode()}
        for delivery in mine:
            await delivery.ack()
        async with two.buses("operator", "operator") as (home_info, _):
            await until(lambda: _is(home_info, (0, 0)))
        for delivery in theirs:  # and even one for what the site's consumer has out doesn't reach it from home
            await home.ack_of(delivery.receipt)
        await home.last(TRAJECTORY, "any")  # whatever was sent before is with the server
        await buffer.publish(far, b"after the acks")
        await there(site, CONTROL, 5)
        assert await pending(looking) == (2, 1), "an ack at home counted for the site's consumer of the same name"
        await theirs[0].ack()
        await until(lambda: _is(looking, (1, 1)))


async def _is(bus: Bus, wanted: tuple[int, int]) -> bool:
    return await pending(bus) == wanted


async def _registered(bus: Bus, replicas: set[str]) -> bool:
    return set(await bus.kv(REPLICAS).items()) == replicas


async def test_what_either_side_writes_stands_at_home_once_and_at_the_site_only_its_own(two: Pair) -> None:
    async with two.buses("rollout-worker", "rollout-worker") as (home, site), two.buses("viewer", "viewer") as (see, far):
        names = see.topology
        for number in range(20):
            assert (await home.create(names.trajectory(number, 0), b"home %d" % number)).won
            assert (await site.create(names.trajectory(number, 1), b"site %d" % number)).won
        await site.publish(names.failure(3, 1), b"failed far away")
        await site.kv(REPLICAS).put("far", b"alive")
        await there(see, TRAJECTORY, 40)
        await there(see, OUTCOME, 1)
        at_home, at_site = await subjects(see, TRAJECTORY), await subjects(far, TRAJECTORY)
        assert at_site == [(f"trajectory.{number}.1", b"site %d" % number) for number in range(20)]
        assert sorted(at_home) == sorted(at_site + [(f"trajectory.{number}.0", b"home %d" % number) for number in range(20)])
        assert await subjects(see, OUTCOME) == [("outcome.failure.3.1", b"failed far away")]
        await until(lambda: _registered(see, {"far"}))  # a source of its own, which may come after the others
        with pytest.raises(UsageError):
            await site.publish(names.control("end"), b"not a worker's to say")
    async with two.buses("publisher", "publisher") as (home, site), two.buses("viewer", "viewer") as (see, far):
        await home.publish(names.policy("committed"), b"home decides")
        await there(far, POLICY, 1)
        assert await subjects(far, POLICY) == await subjects(see, POLICY)


async def test_a_cut_line_loses_and_doubles_nothing_and_both_sides_of_a_sample_arrive(two: Pair) -> None:
    async with (
        two.buses("buffer", "rollout-worker") as (buffer, site), two.buses("rollout-worker", "viewer") as (home, far),
        two.buses("viewer", "viewer") as (see, _),
    ):  # fmt: skip
        names = see.topology
        await buffer.publish(names.task(TRAIN, site=SITE), b"before")
        await site.create(names.trajectory(1, 0), b"before")
        await there(site, CONTROL, 1)
        await there(see, TRAJECTORY, 1)
        two.cut()
        for number in range(2, 12):
            await site.create(names.trajectory(number, 0), b"while cut %d" % number)
            await buffer.publish(names.task(TRAIN, site=SITE), b"while cut %d" % number)
        await site.kv(REPLICAS).put("far", b"alive all the time")
        assert (await home.create(names.trajectory(5, 0), b"home's own")).won, "home can't know of the site's"
        assert (await far.stream_state(CONTROL)).messages == 1
        assert (await see.stream_state(TRAJECTORY)).messages == 2
        two.heal()
        await there(far, CONTROL, 11)
        await there(see, TRAJECTORY, 12)
        assert await subjects(far, CONTROL) == await subjects(see, CONTROL)
        arrived = await subjects(see, TRAJECTORY)
        assert [data for subject, data in arrived if subject == "trajectory.5.0"] == [b"home's own", b"while cut 5"]
        assert sorted(arrived) == sorted([*await subjects(far, TRAJECTORY), ("trajectory.5.0", b"home's own")])
        assert not (await home.create(names.trajectory(7, 0), b"too late")).won
        await until(lambda: _has(see, "far"))


async def _has(bus: Bus, key: str) -> bool:
    return await bus.kv(REPLICAS).get(key) is not None


async def test_what_home_purged_does_not_come_back_with_the_line(two: Pair) -> None:
    async with two.buses("buffer", "rollout-worker") as (buffer, site):
        names = buffer.topology
        for number in range(5):
            await site.create(names.trajectory(number, 0), b"%d" % number)
        await there(buffer, TRAJECTORY, 5)
        await buffer.jetstream.call("purge", f"STREAM.PURGE.{names.stream(TRAJECTORY)}", {"seq": 5})
        two.cut()
        await site.create(names.trajectory(9, 0), b"9")
        two.heal()
        await until(lambda: _last(buffer, names.trajectory(9, 0)))
        assert [subject for subject, _ in await subjects(buffer, TRAJECTORY)] == ["trajectory.4.0", "trajectory.9.0"]


async def test_what_is_too_large_for_a_message_is_found_at_home(two: Pair, tmp_path: Path) -> None:
    """A site's own store is a mirror, which home doesn't read."""
    home_store = StoreSettings(url=(tmp_path / "home-store").as_uri())
    site_store = StoreSettings(url=(tmp_path / "mirror").as_uri(), blobs_url=home_store.url)
    data = bytes(9 << 20)
    buses = [
        await Bus.connect(bus_as(bus, role), run=two.run, client_name=role, blobs=Blobs(open_store(store.for_blobs), two.run))
        for bus, role, store in ((two.home, "viewer", home_store), (two.site, "rollout-worker", site_store))
    ]
    home, site = buses
    try:
        await site.create(site.topology.trajectory(1, 0), data)
        await until(lambda: _last(home, home.topology.trajectory(1, 0)))
        assert (await home.get(TRAJECTORY, 1)).data == data
    finally:
        for bus in buses:
            await bus.close()


async def _last(bus: Bus, subject: str) -> bool:
    return await bus.last(TRAJECTORY, subject) is not None
