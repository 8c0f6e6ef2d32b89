"""`towline up` goes on only with the bus and the store that the run has its records in."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from rich.console import Console

from contract import samples
from towline.bus.client import Bus
from towline.bus.control_log import ControlLog
from towline.config import BusSettings, Settings, load_settings
from towline.contract.codec import encode
from towline.contract.control import TaskRecord, WriterRecord
from towline.contract.entries import BaseEntry, OpenEntry, VersionEntry
from towline.errors import UsageError
from towline.local.run_directory import RunDirectory
from towline.local.up import Up
from towline.store.log import Log
from towline.store.objects import open_store

TOML = """
[run]
name = "{name}"
[store]
url = "file://{store}"
[model]
source = "model"
[prompts]
source = "mine:prompts"
[sampling]
max_tokens = 6
[reward]
function = "mine:reward"
"""


def settings_of(folder: Path, run: str) -> Settings:
    path = folder / "run.toml"
    path.write_text(TOML.format(name=run, store=folder / "store"))
    return load_settings(path)


async def check(bus: Bus, settings: Settings, folder: Path) -> None:
    up = Up(settings, folder / "run.toml", RunDirectory(folder / "runs"), Console())
    await up._check_stores(bus, Log(open_store(settings.store), settings.run.name), settings)


async def test_a_run_with_records_on_the_bus_and_an_empty_store_is_refused(
    bus_settings: BusSettings, run_name: str, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, run_name)
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test")
    try:
        await bus.ensure()
        await check(bus, settings, tmp_path)
        pen = ControlLog(bus, "b1")
        await pen.append([(bus.topology.control("writer"), encode(WriterRecord(writer="b1/0", at=time.time())))])
        await check(bus, settings, tmp_path)
        await pen.append([(bus.topology.task("train"), encode(TaskRecord(writer="b1/1", task=samples.TASK)))])
        with pytest.raises(UsageError, match="it ran with another store") as caught:
            await check(bus, settings, tmp_path)
        assert caught.value.code == "store_mismatch"
    finally:
        await bus.close()


async def test_a_run_whose_batches_the_bus_does_not_have_is_refused(
    bus_settings: BusSettings, run_name: str, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, run_name)
    log = Log(open_store(settings.store), run_name)
    log.append(
        lambda log: BaseEntry(
            number=0, prev=None, write_id="w0", at=0.0, source="m", revision=None, anchor="a", layout_digest="l", model_digest="m"
        )
    )
    log.append(
        lambda log: OpenEntry(
            number=1,
            prev=log.head_digest,
            write_id="w1",
            at=0.0,
            base=0,
            base_digest=log.digest(0),
            depth=0,
            batch_cursor=0,
            checkpoint=None,
        )
    )
    log.append(
        lambda log: VersionEntry(
            number=2,
            prev=log.head_digest,
            write_id="w2",
            at=0.0,
            epoch=1,
            base=0,
            base_digest=log.digest(0),
            depth=1,
            skipped=(),
            representation="delta",
            codec="gap",
            folder="f",
            manifest_digest="x",
            layout_digest="l",
            model_digest="n",
            density=0.0,
            wire_bytes=0,
            model_bytes=1,
            step=1,
            batch_cursor=9,
            checkpoint=None,
            probe=None,
            encode_seconds=0.0,
            upload_seconds=0.0,
            verify_seconds=0.0,
        )
    )
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test")
    try:
        await bus.ensure()
        with pytest.raises(UsageError, match="it ran with another bus"):
            await check(bus, settings, tmp_path)
    finally:
        await bus.close()
