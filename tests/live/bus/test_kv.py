"""Buckets: the last value of a key, one winner of each race, and entries that go when nobody renews them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from support.proxy import proxied
from support.waiting import until
from towline.bus import jetstream
from towline.bus.client import Bus
from towline.bus.topology import ACKS, BUCKETS, STATUS
from towline.config import BusSettings
from towline.errors import UsageError


async def test_put_get_delete_and_items(bus: Bus) -> None:
    bucket = bus.kv(ACKS)
    assert await bucket.get("worker.1") is None
    assert await bucket.items() == {}
    await bucket.put("worker.1", b"a")
    await bucket.put("worker.1", b"b")
    await bucket.put("trainer", b"")
    assert await bucket.get("worker.1") == b"b"
    assert await bucket.items() == {"worker.1": b"b", "trainer": b""}
    await bucket.delete("worker.1")
    assert await bucket.get("worker.1") is None
    assert await bucket.items() == {"trainer": b""}
    assert await bus.kv(STATUS).items() == {}


async def test_no_key_is_missing_while_it_is_renewed(bus: Bus) -> None:
    bucket = bus.kv(ACKS)
    keys = {f"replica-{index}" for index in range(3)}
    for key in keys:
        await bucket.put(key, b"0")

    async def renew(key: str) -> None:
        count = 0
        while True:
            count += 1
            await bucket.put(key, b"%d" % count)

    writers = [asyncio.create_task(renew(key)) for key in keys]
    try:
        for _ in range(60):
            assert set(await bucket.items()) == keys
    finally:
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)


async def test_create_and_update_have_one_winner(bus: Bus) -> None:
    bucket = bus.kv(ACKS)
    created = await asyncio.gather(*(bucket.create("key", b"%d" % i) for i in range(10)))
    assert sum(revision is not None for revision in created) == 1
    revision = next(revision for revision in created if revision is not None)
    updated = await asyncio.gather(*(bucket.update("key", b"u%d" % i, revision) for i in range(10)))
    winners = [i for i, new in enumerate(updated) if new is not None]
    assert len(winners) == 1
    assert await bucket.entry("key") == (b"u%d" % winners[0], updated[winners[0]])
    assert not await bucket.delete("key", revision)
    assert await bucket.delete("key", updated[winners[0]])
    assert await bucket.create("key", b"again") is not None
    assert await bucket.get("key") == b"again"


async def test_a_lost_answer_to_an_update_is_resolved(bus: Bus, bus_settings: BusSettings) -> None:
    async with proxied(bus_settings.url) as proxy:
        far = await Bus.connect(bus_settings.model_copy(update={"url": proxy.url}), run=bus.topology.run, client_name="far")
        revision = await bus.kv(ACKS).put("key", b"first")
        proxy.swallow = True
        updating = asyncio.create_task(far.kv(ACKS).update("key", b"second", revision))

        async def arrived() -> bool:
            return await bus.kv(ACKS).get("key") == b"second" and proxy.swallowed_bytes > 0

        await until(arrived)
        proxy.swallow = False
        proxy.cut()
        assert await asyncio.wait_for(updating, 60.0) == revision + 1
        await far.close()


async def test_an_entry_goes_when_it_is_not_renewed(
    bus_settings: BusSettings, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(STATUS, ttl_seconds=1.0)
    monkeypatch.setattr(jetstream, "BUCKETS", tuple(short if spec is STATUS else spec for spec in BUCKETS))
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test")
    await bus.ensure()
    bucket = bus.kv(short)
    await bucket.put("gone", b"x")
    for _ in range(4):
        await bucket.put("renewed", b"y")
        await asyncio.sleep(0.4)
    await until(lambda: _is_missing(bus, "gone"))
    assert await bucket.items() == {"renewed": b"y"}
    assert await bucket.create("gone", b"new") is not None
    await bus.close()


async def _is_missing(bus: Bus, key: str) -> bool:
    return await bus.kv(STATUS).get(key) is None


async def test_a_key_that_would_be_a_wildcard_is_refused(bus: Bus) -> None:
    for key in ("", "a b", "a.*", ">", ".a", "a..b"):
        with pytest.raises(UsageError, match="use letters"):
            await bus.kv(ACKS).put(key, b"")
