"""Two replicas of one name over sites, and a site that is shut out by its key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from live.sites.pair import ACCOUNT, SITE, Pair, pair
from support.waiting import until
from towline.access.credentials import bus_users
from towline.access.nats_config import Account, users_config
from towline.access.roles import ROLES
from towline.access.sites import leaf_users
from towline.buffer.fleet import Fleet
from towline.bus.across import Across
from towline.bus.client import Bus
from towline.bus.topology import CONTROL, REPLICAS
from towline.engine.synthetic import SyntheticEngine
from towline.errors import UnavailableError, UsageError
from towline.replica.registry import Registry
from towline.replica.states import StateMachine


def registry(bus: Bus, name: str) -> Registry:
    return Registry(
        bus, replica=name, engine=SyntheticEngine(slots=2), states=StateMachine(), version=lambda: 0, busy=lambda: 0,
        subscription="latest", failed={}, site=bus.topology.site,
    )  # fmt: skip


async def test_a_name_that_another_site_has_is_refused_and_one_that_could_not_be_asked_for_is_told_of_later(
    tmp_path: Path, run_name: str
) -> None:
    async with pair(tmp_path, run_name) as two:
        await two.prepare()
        async with two.buses("rollout-worker", "rollout-worker") as (home, site), two.buses("buffer") as (buffer, _):
            near, far = registry(home, "w-near"), registry(site, "w-far")
            running = [asyncio.create_task(one.run()) for one in (near, far)]
            await until(lambda: _has(buffer, {"w-near", "w-far"}))
            with pytest.raises(UsageError, match=r"replica w-near is alive at home .* start this one, at site b, under another"):
                await registry(site, "w-near").run()
            twin = registry(home, "w-far")
            with pytest.raises(UsageError, match="replica w-far is alive at site b"):
                await twin.run()
            await twin.leave()
            assert await home.kv(REPLICAS).get("w-far") is not None, "one that was refused took the other's entry away"
            fleet = Fleet(buffer, 3.0)
            two.cut()
            await until(lambda: _away(home))
            running.append(asyncio.create_task(registry(site, "w-near").run()))  # nobody can be asked now
            await until(lambda: _has(site, {"w-near", "w-far"}))
            two.heal()

            async def noticed() -> bool:
                await fleet.refresh([])
                near.renew()
                return "w-near" in fleet.twice

            await until(noticed, 40.0)
            assert set(fleet.twice["w-near"]) == {"", SITE}
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await fleet.close()


async def _has(bus: Bus, names: set[str]) -> bool:
    return names <= set(await bus.kv(REPLICAS).items())


async def _away(home: Bus) -> bool:
    try:
        await Across(home.connection, SITE).bounds(home.topology.stream(CONTROL))
    except (UnavailableError, UsageError):  # no way there, or not for this user any more
        return True
    return False


@pytest.mark.slow
async def test_a_site_is_shut_out_at_its_next_connection_by_taking_its_key_away_and_comes_back_with_a_new_one(
    tmp_path: Path, run_name: str
) -> None:
    async with pair(tmp_path, run_name, walls=False) as two:
        await two.prepare()
        async with two.buses("buffer", "viewer") as (buffer, far):
            await _sends(buffer, far, b"before", 1)
            await _let_in(two, run_name, {})
            two.cut()  # nats-server asks a site who it is when it connects: one that is in stays in until then
            await asyncio.sleep(0.5)
            two.heal()
            await buffer.publish(buffer.topology.task("train", site=SITE), b"not for one who is shut out")
            await asyncio.sleep(2.0)  # it dials again each second
            assert (await far.stream_state(CONTROL)).messages == 1
            await _let_in(two, run_name, leaf_users(tmp_path / "keys", [SITE]))
            await _sends(buffer, far, b"after", 3)


async def _let_in(two: Pair, run: str, sites: dict[str, str]) -> None:
    """As `towline access nats` with or without --site, and the server's reload."""
    config = two.folder / "home.conf"
    key = next(iter(leaf_users(two.folder / "keys", [SITE]).values()))
    before = users_config([Account(ACCOUNT, [run], bus_users(two.folder / "keys", ROLES), sites={SITE: key})])
    without = users_config([Account(ACCOUNT, [run], bus_users(two.folder / "keys", ROLES))])
    text = config.read_text()
    standing, wanted = (without, before) if sites else (before, without)
    assert standing in text
    config.write_text(text.replace(standing, wanted))
    two.servers["home"].reload()


async def _sends(buffer: Bus, far: Bus, data: bytes, count: int) -> None:
    await buffer.publish(buffer.topology.task("train", site=SITE), data)

    async def arrived() -> bool:
        return (await far.stream_state(CONTROL)).messages == count

    await until(arrived, 60.0)


async def test_what_a_sites_server_may_not_do_at_home_it_cannot(tmp_path: Path, run_name: str) -> None:
    async with pair(tmp_path, run_name, roles=True, walls=False) as two:
        await two.prepare()
        async with two.buses("buffer", "operator") as (buffer, _):
            await _nothing_but_ours(two, buffer)


async def _nothing_but_ours(two: Pair, buffer: Bus) -> None:
    """The site's server is somebody else's now: it lets anybody do anything in the account, and its own rules are gone."""
    text = (two.folder / "site.conf").read_text()
    key = leaf_users(two.folder / "keys", [SITE])[SITE]
    mine = users_config([Account(ACCOUNT, [two.run], bus_users(two.folder / "keys", ROLES), sites={SITE: key})])
    users = f"accounts {{ {ACCOUNT} {{ jetstream: enabled, users: [ {{ user: any, password: any }} ] }} }}\nno_auth_user: any\n"
    assert mine in text
    head, _, rest = text.replace(mine, users).partition("    deny_imports: [")
    (two.folder / "site.conf").write_text(head + rest[rest.rindex("  } ]") :])
    await two.servers[SITE].stop()
    await two.servers[SITE].start()
    thief = await Bus.connect(
        two.site.model_copy(update={"keys_folder": ""}), run=two.run, client_name="thief", patience_seconds=3
    )
    try:
        home = Across(thief.connection, two.home.home_domain)
        stream = thief.topology.stream(CONTROL)

        async def connected() -> bool:
            return not await _silent(home, f"STREAM.INFO.{stream}")

        await until(connected, 30.0)
        for verb in ("PURGE", "DELETE"):
            assert await _silent(home, f"STREAM.{verb}.{stream}")
        await thief.connection.send(thief.topology.control("end"), b"over")
        await buffer.publish(buffer.topology.control("snapshot"), b"home's own")
        found = [message.data async for message in buffer.read(CONTROL, follow=False)]
        assert found == [b"home's own"]
    finally:
        await thief.close()


async def _silent(home: Across, api: str) -> bool:
    try:
        await home.call(api)
    except UnavailableError:
        return True
    return False
