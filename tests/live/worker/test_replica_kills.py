"""A replica's process killed at each step of preparing and activating: it comes back to a verified version."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from live.worker.world import World
from towline import faults
from towline.config import BusSettings
from towline.delta.files import read_safetensors
from towline.replica.host import HostCopies
from unit.engine.models import digest_of

TOML = """
run = {{ name = "{run}", directory = "{folder}/runs" }}
bus = {{ url = "{url}", budget_bytes = {bus_budget} }}
store = {{ url = "{store}" }}
model = {{ source = "tiny" }}
prompts = {{ source = "a:b" }}
sampling = {{ max_tokens = 8 }}
eval = {{ every = 0 }}
rollout = {{ slots = 4, poll_seconds = 0.1, copy_folder = "{folder}/copies", copy_budget_bytes = {budget} }}
reward = {{ function = "a:b" }}
"""
POINTS = [point for point in faults.POINTS if point.startswith("replica.")]
BESIDE, IN_PLACE = 0, 1


async def start(world: World, settings: BusSettings, copies: int, fault: str | None) -> asyncio.subprocess.Process:
    config = world.folder / "run.toml"
    size = sum(tensor.spec.nbytes for tensor in world.states[0].values())
    config.write_text(
        TOML.format(
            run=world.run, folder=world.folder, url=settings.url, bus_budget=settings.budget_bytes,
            store=(world.folder / "store").as_uri(), budget=copies * size,
        )
    )  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({faults.VARIABLE: fault} if fault else {})
    log = (world.folder / "worker.log").open("ab")
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "towline.rollout_worker", "--config", str(config), "--replica", "w",
        stdout=log, stderr=asyncio.subprocess.STDOUT, env=environment,
    )  # fmt: skip


async def end(process: asyncio.subprocess.Process) -> int:
    """Its exit code."""
    if process.returncode is None:
        process.kill()
    return await process.wait()


def log_of(world: World) -> str:
    return (world.folder / "worker.log").read_text()[-3000:]


async def dies_and_comes_back(world: World, settings: BusSettings, point: str, copies: int, *, at_first: bool) -> None:
    world.seed()
    process = await start(world, settings, copies, f"{point}#{1 if at_first else 2}")
    try:
        if at_first:
            version = 0
        else:
            await world.served(0, seconds=60.0)
            version = world.commit(1)
        assert await asyncio.wait_for(process.wait(), 60.0) == -signal.SIGKILL, log_of(world)
    finally:
        await end(process)
    host = HostCopies(world.folder / "copies" / world.run, world.run)
    for copy in host.record().copies:
        if copy.state == "good":
            assert digest_of(read_safetensors(host.path(copy))) == digest_of(world.states[copy.version])
    if point != "replica.acknowledged":
        ack = await world.ack("w")
        assert ack is None or ack.version != version, "nothing is acknowledged before it is proved"
    process = await start(world, settings, copies, None)
    try:
        version = world.commit(2)
        ack = await world.served(version, seconds=60.0)
        assert ack.files_digest == ack.engine_digest == digest_of(world.states[version])
        await world.task(1, not_before_depth=world.log.lineage.depth(version))
        assert (await world.trajectory(1, seconds=30.0)).version_start == version
    finally:
        assert await end(process) == -signal.SIGKILL, log_of(world)
    assert not list(host.folder.glob("*.tmp"))


@pytest.mark.parametrize("copies", [BESIDE, IN_PLACE])
async def test_a_replica_killed_amid_writing_a_version_comes_back_to_a_verified_one(
    world: World, bus_settings: BusSettings, tmp_path: Path, copies: int
) -> None:
    await dies_and_comes_back(world, bus_settings, "replica.copy_partly", copies, at_first=False)


@pytest.mark.slow
@pytest.mark.parametrize("at_first", [False, True])
@pytest.mark.parametrize("copies", [BESIDE, IN_PLACE])
@pytest.mark.parametrize("point", POINTS)
async def test_a_replica_killed_at_any_step_comes_back_to_a_verified_version(
    world: World, bus_settings: BusSettings, tmp_path: Path, point: str, copies: int, at_first: bool
) -> None:
    await dies_and_comes_back(world, bus_settings, point, copies, at_first=at_first)
