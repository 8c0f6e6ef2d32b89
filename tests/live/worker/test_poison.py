"""A task that fails every time, or takes its worker with it, ends in DEAD; those beside it come through."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from live.worker.conftest import Start
from live.worker.test_process import TOML
from live.worker.world import World
from support.waiting import until
from towline.bus.topology import CONTROL, DEAD
from towline.config import BusSettings
from towline.contract.task import SamplingParams

SETTINGS = """ack_wait_seconds = 1.5
max_starts = 3
arguments = {mean_tokens = 40.0, sigma = 0.01, tokens_per_second = 20.0}"""


async def test_a_task_that_kills_its_worker_ends_in_dead_and_those_beside_it_are_delivered(
    world: World, bus_settings: BusSettings
) -> None:
    """They take two seconds each, the killer none: so it takes them with it until it's begun alone."""
    world.seed()
    config = world.folder / "run.toml"
    text = TOML.format(
        run=world.run, folder=world.folder / "runs", url=bus_settings.url, budget=bus_settings.budget_bytes,
        store=(world.folder / "store").as_uri(), engine="synthetic",
    )  # fmt: skip
    config.write_text(text.replace("[rollout]", f"[rollout]\n{SETTINGS}"))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    arguments = ["-m", "towline.rollout_worker", "--config", str(config), "--replica", "w"]
    long = SamplingParams(max_tokens=60)
    killer = await world.task(1, environment="live.worker.environments:Killing", sampling=SamplingParams(max_tokens=1))
    for group in (2, 3, 4):
        await world.task(group, sampling=long)
    deaths = 0
    process = None
    try:
        while deaths < 10:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, env=environment, stdout=asyncio.subprocess.DEVNULL
            )
            ended = asyncio.create_task(process.wait())
            outcome = asyncio.create_task(world.failure(120.0))
            await asyncio.wait([ended, outcome], return_when=asyncio.FIRST_COMPLETED)
            if outcome.done():
                break
            outcome.cancel()
            assert ended.result() == -signal.SIGKILL
            deaths += 1
        for group in (2, 3, 4):
            await world.trajectory(group, seconds=60.0)
    finally:
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
    assert deaths == 3
    [failure] = await world.failures()
    assert (failure.group, failure.stage, failure.final, failure.task_sequence) == (1, "poisoned", True, killer)
    await _assert_dead(world, killer)
    await until(lambda: _acked(world))


async def test_a_task_that_fails_every_time_is_in_dead_after_the_last_attempt_that_the_buffer_makes(
    world: World, start: Start
) -> None:
    world.seed()
    await start(buffer={"max_attempts": 3})
    for attempt in range(3):
        sequence = await world.task(1, environment="live.worker.environments:Broken", attempt=attempt)
        await until(lambda attempt=attempt: _failed(world, attempt + 1))  # type: ignore[misc]
        dead = await world.bus.last(DEAD, world.bus.topology.dead("rollout"))
        assert (dead is not None) == (attempt == 2)
    assert [failure.stage for failure in await world.failures()] == ["environment"] * 3
    await _assert_dead(world, sequence)


async def _assert_dead(world: World, sequence: int) -> None:
    dead = await world.bus.last(DEAD, world.bus.topology.dead("rollout"))
    assert dead is not None
    assert dead.data == (await world.bus.get(CONTROL, sequence)).data


async def _failed(world: World, times: int) -> bool:
    return len(await world.failures()) == times


async def _acked(world: World) -> bool:
    return await world.unacked() == (0, 0)
