"""A lease has one holder: it passes on when it isn't renewed, and who lost it learns of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from support.waiting import until
from towline.bus import jetstream
from towline.bus.client import Bus
from towline.bus.topology import BUCKETS, LEASES
from towline.config import BusSettings
from towline.errors import FencedError
from towline.local.servers import NatsServer
from towline.runtime import lease as lease_module
from towline.runtime.lease import Lease

TTL_SECONDS = 1.2


def _unheard(reason: str) -> None: ...


@pytest.fixture
async def bus(bus_settings: BusSettings, run_name: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bus]:
    """A run whose leases last about a second."""
    short = replace(LEASES, ttl_seconds=TTL_SECONDS)
    monkeypatch.setattr(jetstream, "BUCKETS", tuple(short if spec is LEASES else spec for spec in BUCKETS))
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", TTL_SECONDS / 4)
    monkeypatch.setattr(lease_module, "STANDBY_POLL_SECONDS", 0.05)
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test")
    await bus.ensure()
    yield bus
    await bus.close()


async def test_one_of_many_gets_it_and_keeps_it_while_it_renews(bus: Bus) -> None:
    leases = [Lease(bus, "pen", f"r{i}") for i in range(5)]
    standby: set[str] = set()
    acquiring = {asyncio.create_task(lease.acquire(standby.add, _unheard)): lease for lease in leases}
    done, waiting = await asyncio.wait(acquiring, return_when="FIRST_COMPLETED")
    assert len(done) == 1
    holder = acquiring[done.pop()]
    keeping = asyncio.create_task(holder.keep())
    await asyncio.sleep(2 * TTL_SECONDS)
    assert not keeping.done()
    assert not any(task.done() for task in waiting)
    assert f"standby: pen is held by {holder.replica}" in standby
    keeping.cancel()  # as a dead process would
    done, waiting = await asyncio.wait(waiting, return_when="FIRST_COMPLETED", timeout=4 * TTL_SECONDS)
    assert len(done) == 1
    for task in waiting:
        task.cancel()


async def test_a_released_lease_is_free_at_once(bus: Bus) -> None:
    first, second = Lease(bus, "pen", "a"), Lease(bus, "pen", "b")
    await first.acquire(_unheard, _unheard)
    waiting = asyncio.create_task(second.acquire(_unheard, _unheard))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await first.release()
    await asyncio.wait_for(waiting, TTL_SECONDS / 2)


async def test_the_former_self_is_fenced_and_gives_up_nothing_that_is_not_its_own(bus: Bus) -> None:
    former, present = Lease(bus, "pen", "a"), Lease(bus, "pen", "a")
    await former.acquire(_unheard, _unheard)
    keeping = asyncio.create_task(former.keep())
    await asyncio.wait_for(present.acquire(_unheard, _unheard), 1.0)
    with pytest.raises(FencedError, match="lease pen is held by another"):
        await asyncio.wait_for(keeping, 60.0)
    await former.release()
    assert await bus.kv(LEASES).entry("pen") is not None
    await present.release()
    assert await bus.kv(LEASES).entry("pen") is None


async def test_a_holder_keeps_it_over_a_time_without_the_bus(
    run_name: str, bus: Bus, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = NatsServer(tmp_path_factory.mktemp("own-nats"))
    server.start()
    try:
        own = await Bus.connect(server.settings(BusSettings(budget_bytes=64 << 20)), run=run_name, client_name="test")
        await own.ensure()
        lease = Lease(own, "pen", "a")
        await lease.acquire(_unheard, _unheard)
        keeping = asyncio.create_task(lease.keep())
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(2 * TTL_SECONDS)  # the entry ends meanwhile
        assert not keeping.done()
        await asyncio.to_thread(server.start)
        await until(lambda: own.connected)

        async def held() -> bool:
            return await own.kv(LEASES).entry("pen") is not None

        await until(held)
        assert not keeping.done()
        keeping.cancel()
        await own.close()
    finally:
        server.kill()


async def test_who_cannot_ask_the_bus_is_no_standby(run_name: str, bus: Bus, tmp_path_factory: pytest.TempPathFactory) -> None:
    server = NatsServer(tmp_path_factory.mktemp("own-nats"))
    server.start()
    try:
        settings = server.settings(BusSettings(budget_bytes=64 << 20))
        own = await Bus.connect(settings, run=run_name, client_name="test", patience_seconds=0.3)
        await own.ensure()
        await Lease(own, "pen", "a").acquire(_unheard, _unheard)
        standby, silence = set[str](), set[str]()
        waiting = asyncio.create_task(Lease(own, "pen", "b").acquire(standby.add, silence.add))
        await until(lambda: bool(standby))
        await asyncio.to_thread(server.kill)
        standby.clear()
        await until(lambda: bool(silence))
        assert not standby
        assert all(reason.startswith("standby: ") for reason in silence)
        waiting.cancel()
        await own.close()
    finally:
        server.kill()
