"""kill -9 of the publisher at every point where it has done one thing and not the next, on a real bus and S3 server."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from live.publisher.harness import next_staged, publisher_lives, publisher_process, said, send, settings_for, write_config
from live.store.models import begun, same
from support.waiting import until
from towline import faults
from towline.bus.client import Bus
from towline.config import BusSettings, StoreSettings
from towline.contract.entries import VersionEntry
from towline.contract.policy import Committed, Staged
from towline.store.anchors import load_anchor, read_anchor
from towline.store.log import Log
from towline.store.materialize import materialize
from towline.store.objects import open_store

POINTS = [name for name in faults.POINTS if name.startswith("publisher.")]


async def test_a_publisher_killed_at_any_point_leaves_one_entry_a_version(
    bus_settings: BusSettings, s3_settings: StoreSettings, run_name: str, tmp_path: Path
) -> None:
    """Each process dies at its point while it handles a version; the next one settles that version and dies at the next point."""
    assert len(POINTS) == 7
    objects = open_store(s3_settings)
    run = begun(objects, run_name)
    settings = settings_for(run_name, bus_settings, s3_settings, anchor_every=1)
    config = tmp_path / "run.toml"
    write_config(config, settings)
    bus = await Bus.connect(settings.bus, run=run_name, client_name="test")
    await bus.ensure()
    unsettled = None
    async with publisher_lives(config) as lives:
        for point in [*POINTS, None]:
            unarmed = tmp_path / f"unarmed-{point}"
            unarmed.touch()
            await lives.start("" if point is None else f"{point}@{unarmed}")
            if unsettled is not None:
                staged, state = unsettled
                await _settle(bus, staged)
                run.log.refresh()
                entry = run.log.find(staged.write_id)
                assert isinstance(entry, VersionEntry)
                run.states[entry.number] = state
            if point is None:
                os.kill(lives.pid, signal.SIGTERM)
                assert await lives.end() == 0
                break
            unsettled = next_staged(run)
            unarmed.unlink()
            await send(bus, unsettled[0])
            assert await lives.end() == -signal.SIGKILL, point
    log = Log(objects, run_name)
    log.refresh()
    committed = [e for e in log.entries() if isinstance(e, VersionEntry)]
    assert [e.depth for e in committed] == list(range(1, len(POINTS) + 1))
    assert log.lineage.path() == [0, *(e.number for e in committed)]
    assert {m.write_id for m in await said(bus) if isinstance(m, Committed)} == {e.write_id for e in committed}
    assert len(await said(bus)) >= len(committed)
    for entry in committed:
        assert same(materialize(objects, log, entry.number), run.states[entry.number])
    anchored = [int(item.key.split("/")[2][:8]) for item in objects.list(f"{run_name}/anchors/") if item.key.count("/") == 2]
    assert len(anchored) > 2
    for version in anchored:
        assert same(load_anchor(objects, read_anchor(objects, run_name, version)), run.states[version])
    await bus.close()


async def _settle(bus: Bus, staged: Staged) -> None:
    """Send it, again after a while, as the trainer does, until another verdict on it is said."""

    async def verdicts() -> int:
        return sum(isinstance(m, Committed) and m.write_id == staged.write_id for m in await said(bus))

    before = await verdicts()
    for _ in range(5):
        await send(bus, staged)
        with contextlib.suppress(TimeoutError):
            await until(lambda: _more(verdicts, before), seconds=4)
            return
    raise AssertionError(f"nothing was said of {staged}")


async def _more(count: Callable[[], Awaitable[int]], before: int) -> bool:
    return await count() > before


@pytest.mark.parametrize("wrong", ["store", "bus"])
async def test_a_wrong_setting_is_one_line_and_an_exit_code(
    bus_settings: BusSettings, s3_settings: StoreSettings, run_name: str, tmp_path: Path, wrong: str
) -> None:
    if wrong == "store":
        s3_settings = s3_settings.model_copy(update={"url": "s3://no-such-bucket-at-all"})
    else:
        bus_settings = bus_settings.model_copy(update={"url": "nats://127.0.0.1:9", "connect_timeout_seconds": 0.5})
    config = tmp_path / "run.toml"
    write_config(config, settings_for(run_name, bus_settings, s3_settings))
    code, stderr = await publisher_process(config)
    assert code == (2 if wrong == "store" else 1)
    assert len(stderr.strip().splitlines()) == 1
    assert "Traceback" not in stderr
