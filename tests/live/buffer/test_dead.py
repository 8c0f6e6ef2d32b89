"""`towline dead`: what nobody could act on is kept whole and can be looked at."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from live.buffer.harness import connected, leading, seed, settings_for
from live.buffer.test_process import write_toml
from support.waiting import until
from towline.bus.topology import DEAD
from towline.config import BusSettings, StoreSettings


def towline(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "towline.cli.main", "dead", *arguments]
    return subprocess.run(command, capture_output=True, timeout=60, check=False)


async def test_dead_letters_are_listed_and_shown_whole(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, tmp_path: Path
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings)
    config = str(write_toml(tmp_path / "run.toml", settings))
    garbage = b"\x00not an outcome"
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        async with leading(settings, bus, objects) as leader:
            await until(lambda: bool(leader.state.open_train))
            await bus.publish(bus.topology.failure(0, 0), garbage)

            async def is_dead() -> bool:
                return (await bus.stream_state(DEAD)).messages == 1

            await until(is_dead)
        await bus.dead("reward", b"x" * 10, "a  second\nreason", failure="verify")
        listed = await asyncio.to_thread(towline, "list", config, "--json")
        only = await asyncio.to_thread(towline, "list", config, "--stage", "reward")
        shown = await asyncio.to_thread(towline, "show", config, "1", "--json")
        raw = await asyncio.to_thread(towline, "show", config, "1", "--raw")
        missing = await asyncio.to_thread(towline, "show", config, "9")
    rows = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [(row["sequence"], row["stage"], row["nbytes"]) for row in rows] == [(1, "outcome", 15), (2, "reward", 10)]
    assert rows[0]["context"]["subject"] == f"towline.{run_name}.outcome.failure.0.0"
    assert rows[1]["reason"] == "a second reason"
    assert only.stdout.decode().splitlines()[-1] == "1 reward"
    assert json.loads(shown.stdout)["content"] == {"unreadable": garbage.hex()}
    assert raw.stdout == garbage
    assert missing.returncode == 1
    assert missing.stderr.decode().strip().endswith("has no dead letter 9; see `towline dead list`")
