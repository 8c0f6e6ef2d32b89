"""The worker as a process of its own: ready when it serves, drained by SIGTERM, gone with the run, exit code 0 each time."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec

from live.worker.world import World
from support.waiting import until
from towline.bus.topology import STATUS
from towline.config import BusSettings

TOML = """
[run]
name = "{run}"
directory = "{folder}"
[bus]
url = "{url}"
budget_bytes = {budget}
[store]
url = "{store}"
[model]
source = "tiny"
[prompts]
source = "a:b"
[sampling]
max_tokens = 8
[rollout]
engine = "{engine}"
slots = 4
[reward]
function = "a:b"
[service]
drain_seconds = 4.0
"""


async def begin(world: World, bus_settings: BusSettings, engine: str, replica: str) -> asyncio.subprocess.Process:
    config = world.folder / f"{engine}.toml"
    config.write_text(
        TOML.format(
            run=world.run, folder=world.folder / "runs", url=bus_settings.url, budget=bus_settings.budget_bytes,
            store=(world.folder / "store").as_uri(), engine=engine,
        )
    )  # fmt: skip
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "towline.rollout_worker", "--config", str(config), "--replica", replica,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


async def test_a_worker_s_process_from_ready_to_drained_and_to_the_run_s_end(
    world: World, bus_settings: BusSettings, tmp_path: Path
) -> None:
    world.seed()
    process = await begin(world, bus_settings, "torch", "one")
    try:
        await world.served(0, "one", seconds=120.0)
        await world.task(1)
        assert (await world.trajectory(1)).replica == "one"
        await world.task(2, not_before_depth=3)

        async def busy() -> bool:
            value = await world.bus.kv(STATUS).get("rollout_worker.one")
            status = msgspec.json.decode(value) if value else {"ready": False}
            return bool(status["ready"] and status["figures"]["busy"] == 1 and status["figures"]["trajectories"] == 1)

        await until(busy)
        process.send_signal(signal.SIGTERM)
        output, _ = await asyncio.wait_for(process.communicate(), 60.0)
        assert process.returncode == 0, output.decode()
    finally:
        if process.returncode is None:
            process.kill()
    process = await begin(world, bus_settings, "synthetic", "two")
    try:
        await world.served(0, "two", seconds=120.0)
        await world.task(3)
        assert (await world.trajectory(3)).engine == "synthetic"
        await world.end()
        output, _ = await asyncio.wait_for(process.communicate(), 60.0)
        assert process.returncode == 0, output.decode()
    finally:
        if process.returncode is None:
            process.kill()
