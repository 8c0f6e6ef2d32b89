"""docs/operations.md, backup and restore: a stopped bus's folder and a store's, put elsewhere, are the run; halves of two moments
are refused by whoever would go on with them, and nothing is changed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from live.buffer.harness import Fleet, Trainer, connected, leading, records, seed, settings_for, working
from live.store import logs
from support.bundles import towline
from support.servers import running
from support.waiting import until
from towline.audit.run import audit
from towline.buffer.leader import Leader
from towline.bus.client import Bus
from towline.bus.topology import CONTROL, OUTCOME, TRAJECTORY
from towline.config import BusSettings, Settings, StoreSettings
from towline.doctor.halves import look_at_halves
from towline.errors import InvariantError, TowlineError
from towline.local.run_directory import RunDirectory
from towline.local.servers import NatsServer
from towline.local.toml import settings_toml
from towline.local.up import Up
from towline.store.log import Log
from towline.store.objects import ObjectStore, open_store
from towline.trainer.figures import Figures
from towline.trainer.run import run_trainer

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


def buffer(settings: Settings, bus: Bus, objects: ObjectStore) -> Coroutine[Any, Any, None]:
    return Leader(settings, bus, objects, lambda state: None).lead(asyncio.Event())


def trainer(settings: Settings, bus: Bus, objects: ObjectStore) -> Coroutine[Any, Any, None]:
    return run_trainer(
        settings, bus, objects, replica="t", figures=Figures(), draining=asyncio.Event(), tell=lambda state: None
    )  # fmt: skip


async def refused(settings: Settings, code: str, says: str) -> None:
    """By buffer and trainer; neither writes a record or an entry."""
    async with connected(settings) as (bus, objects):
        before = (await bus.stream_state(CONTROL)).last_sequence, len(Log(objects, RUN).refresh())
        for service in (buffer, trainer):
            with pytest.raises(InvariantError, match=says) as found:
                await service(settings, bus, objects)
            assert found.value.code == code
            if code == "store_regressed":  # a buffer sees that CONTROL is short once it has taken it over
                after = (await bus.stream_state(CONTROL)).last_sequence, len(Log(objects, RUN).refresh())
                assert after == before


async def refused_on_one_machine(settings: Settings, folder: Path, code: str, says: str) -> None:
    """By what `towline up` checks before any service starts; `towline doctor` finds the same."""
    async with connected(settings) as (bus, objects):
        up = Up(settings, folder / "run.toml", RunDirectory(folder / "runs"), Console())
        with pytest.raises(TowlineError) as found:
            await up._check_stores(bus, Log(objects, RUN), settings)
    assert found.value.code == code
    faults = [one async for one in look_at_halves(settings) if one.state == "fault"]
    assert len(faults) == 1
    assert says in faults[0].what
    assert "towline run fork" in faults[0].remedy


async def by_command(settings: Settings, folder: Path, code: str, says: str) -> None:
    prompts = settings.prompts.model_copy(update={"source": "towline.environment.prompts:jsonl"})
    reward = settings.reward.model_copy(update={"function": "towline.verifiers.text:exact_match"})
    toml = folder / "run.toml"
    toml.write_text(settings_toml(settings.model_copy(update={"prompts": prompts, "reward": reward})))
    up = await asyncio.to_thread(towline, folder, "up", str(toml))
    assert up.returncode != 0
    assert up.stderr.startswith(f"{code}: "), up.stdout + up.stderr
    assert len(up.stderr.strip().splitlines()) == 1
    assert not (folder / "runs" / RUN / "logs" / "buffer.log").exists()
    doctor = await asyncio.to_thread(towline, folder, "doctor", str(toml))
    assert doctor.returncode == 1
    [line] = [line for line in doctor.stdout.splitlines() if line.startswith("FAULT   halves:")]
    assert says in line


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
            await refused(mixed, "stream_regressed", "CONTROL ends at")
            await refused_on_one_machine(mixed, folder, "bus_mismatch", "the bus is older than the bucket")


async def test_an_older_bucket_under_a_newer_bus_is_refused_and_the_newer_one_goes_on(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for server in running(NatsServer(tmp_path / "nats", max_store_bytes=ROOM_BYTES)):
        await trained(settings_of(server, store, 2))
        shutil.copytree(store, tmp_path / "older")
        await trained(settings_of(server, store, 4))
        whole = Log(open_store(StoreSettings(url=store.as_uri())), RUN)
        whole.refresh()
        lost = whole.next_number - 1

        mixed = settings_of(server, tmp_path / "older", 6)
        await refused(mixed, "store_regressed", "names LOG entry .* bring back the bucket's newest state")
        await refused_on_one_machine(mixed, tmp_path, "store_regressed", "the bucket is older than the bus")

        # An older build opened and committed on it: the numbers are taken again, by other entries.
        taken = Log(open_store(mixed.store), RUN)
        taken.append(logs.opened())
        while taken.next_number <= lost:
            taken.append(logs.version())
        await refused(mixed, "store_regressed", "has another entry there")

        # An empty bucket isn't seeded anew.
        await refused(settings_of(server, tmp_path / "nothing", 6), "store_regressed", "the bucket's LOG is empty")

        again = settings_of(server, store, 6)
        await trained(again)
        async with connected(again) as (bus, objects):
            report = await audit(bus, Log(objects, RUN), again)
        assert report.clean, report.lines()
        assert (report.depth, report.counts.trained) == (6, 24)


@pytest.mark.slow  # twice `towline up` and twice `towline doctor`, as processes
async def test_the_commands_refuse_halves_of_two_moments_in_a_line(tmp_path: Path) -> None:
    store, older = tmp_path / "store", tmp_path / "older"
    for server in running(NatsServer(tmp_path / "nats", max_store_bytes=ROOM_BYTES)):
        await trained(settings_of(server, store, 1))
        shutil.copytree(store, older / "store")
        await trained(settings_of(server, store, 2))
        await by_command(
            settings_of(server, older / "store", 3), older, "store_regressed", "the bucket is older than the bus"
        )  # fmt: skip
    for server in running(NatsServer(tmp_path / "empty", max_store_bytes=ROOM_BYTES)):
        await by_command(settings_of(server, store, 3), tmp_path / "empty", "bus_mismatch", "the bus is older than the bucket")
