"""docs/operations.md, backup and restore: a stopped bus's folder and a store's, put elsewhere, are the run; halves of two moments
are refused."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from live.buffer.harness import Fleet, Trainer, connected, leading, records, seed, settings_for, working
from support.servers import running
from support.waiting import until
from towline.audit.run import audit
from towline.buffer.leader import Leader
from towline.bus.topology import CONTROL, OUTCOME, TRAJECTORY
from towline.config import BusSettings, Settings, StoreSettings
from towline.errors import InvariantError
from towline.local.servers import NatsServer
from towline.store.log import Log

RUN = "kept"
ROOM_BYTES = 1 << 30
PAGE = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()


def settings_of(server: NatsServer, store: Path, steps: int) -> Settings:
    bus = server.settings(BusSettings(budget_bytes=256 << 20))
    return settings_for(RUN, bus, StoreSettings(url=store.as_uri()), eval={"every": 0}, run={"name": RUN, "steps": steps})


async def trained(settings: Settings) -> None:
    """The run, to its steps."""
    async with connected(settings) as (bus, objects):
        if not Log(objects, RUN).refresh():
            await seed(objects, RUN)
        async with working(Fleet(bus, objects, settings)), leading(settings, bus, objects) as leader:
            await Trainer(bus, objects, settings).train(until_depth=settings.run.steps)
            await until(lambda: leader.finished)


async def test_a_copied_pair_goes_on_with_every_record_and_an_older_bus_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for server in running(NatsServer(tmp_path / "nats", max_store_bytes=ROOM_BYTES)):
        first = settings_of(server, store, 2)
        await trained(first)
        async with connected(first) as (bus, _):
            before = await records(bus)
            for spec, frame in ((CONTROL, 141), (TRAJECTORY, 113), (OUTCOME, 113)):
                state = await bus.stream_state(spec)
                payload = sum([len(message.data) async for message in bus.read(spec, follow=False)])
                assert f"{frame} bytes" in PAGE or f"CONTROL: {frame}" in PAGE
                assert (state.bytes - payload) / state.messages == pytest.approx(frame, rel=0.35), spec.key
        server.stop()
        shutil.copytree(tmp_path / "nats" / "data", tmp_path / "copy" / "nats" / "data")
        shutil.copytree(tmp_path / "nats" / "data", tmp_path / "older" / "data")
        shutil.copytree(store, tmp_path / "copy" / "store")
        server.start()
        await trained(settings_of(server, store, 4))  # the run goes on, and is then lost
        server.stop()
        shutil.rmtree(tmp_path / "nats")

    for server in running(NatsServer(tmp_path / "copy" / "nats", max_store_bytes=ROOM_BYTES)):
        again = settings_of(server, tmp_path / "copy" / "store", 4)
        async with connected(again) as (bus, objects):
            assert await records(bus) == before
        await trained(again)
        async with connected(again) as (bus, objects):
            report = await audit(bus, Log(objects, RUN), again)
            assert report.clean, report.lines()
            assert (report.depth, report.counts.trained) == (4, 16)
            assert (await records(bus))[: len(before)] == before
            assert report.counts.admitted == report.counts.trained + sum(report.counts.dropped.values())

    # The bus of before, or an empty one, beside the bucket of after.
    for folder in (tmp_path / "older", tmp_path / "empty"):
        for server in running(NatsServer(folder, max_store_bytes=ROOM_BYTES)):
            mixed = settings_of(server, store, 6)
            async with connected(mixed) as (bus, objects):
                with pytest.raises(InvariantError, match="restore the bus's storage, or fork") as found:
                    await Leader(mixed, bus, objects, lambda state: None).lead(asyncio.Event())
            assert found.value.code == "stream_regressed"
