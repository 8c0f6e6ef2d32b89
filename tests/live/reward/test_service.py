"""The reward service as a process: killed, drained, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from towline.bus.client import Bus
from towline.bus.topology import CONTROL, OUTCOME, STATUS
from towline.config import load_settings
from towline.contract.codec import encode
from towline.contract.control import EndRecord
from towline.contract.outcome import decode_outcome
from towline.contract.trajectory import encode_trajectory
from towline.local.toml import settings_toml
from towline.report.figures import decode_statuses

REWARDS = """
import time

def quick(sample):
    return float(sample.response_tokens[0])

def slow(sample):
    time.sleep(0.02)
    return 1.0
"""


@pytest.fixture
def config(tmp_path, bus_settings, file_store_settings, run_name):
    """A run's settings file with the user's own module beside it."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    first = tmp_path / "first.toml"
    first.write_text(
        f'[run]\nname = "{run_name}"\nsteps = 3\n[model]\nsource = "unused"\n[prompts]\nsource = "unused:unused"\n'
        '[sampling]\nmax_tokens = 4\n[reward]\nfunction = "my_rewards:quick"\n'
    )
    settings = load_settings(first).model_copy(update={"bus": bus_settings, "store": file_store_settings})
    path = tmp_path / "run.toml"
    path.write_text(settings_toml(settings))
    return path


async def start(config: Path, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "towline.reward", "--config", str(config), "--replica", "0", env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def running(config: Path, **environment: str):
    process = await start(config, **environment)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def scores(bus: Bus) -> dict[tuple[int, int], float]:
    found = [decode_outcome(message.data) async for message in bus.read(OUTCOME, follow=False)]
    assert len({(score.group, score.sample) for score in found}) == len(found), "a sample has two scores"
    return {(score.group, score.sample): score.reward for score in found}


async def until_scored(bus: Bus, count: int, seconds: float = 60.0) -> dict[tuple[int, int], float]:
    async with asyncio.timeout(seconds):
        while len(found := await scores(bus)) < count:  # noqa: ASYNC110 — it's another process that one waits for
            await asyncio.sleep(0.05)
    return found


async def publish(bus: Bus, make_trajectory, groups: range) -> None:
    for group in groups:
        data = encode_trajectory(make_trajectory(group, answer=group))
        await bus.create(bus.topology.trajectory(group, 0), data)


async def test_killed_and_started_again_it_scores_every_sample_once(bus, config, make_trajectory):
    consumer = await bus.consumer(bus.topology.reward_consumer())  # an older one, whose ack wait the service sets right
    slow = {
        "TOWLINE_REWARD__FUNCTION": "my_rewards:slow",
        "TOWLINE_REWARD__CONCURRENCY": "2",
        "TOWLINE_REWARD__ACK_WAIT_SECONDS": "1",
    }
    await publish(bus, make_trajectory, range(100))
    async with running(config, **slow) as process:
        assert len(await until_scored(bus, 10)) < 100
        process.send_signal(signal.SIGKILL)
    async with running(config):
        await until_scored(bus, 100)
    await consumer.close()


async def test_it_ends_by_itself_when_the_run_has_ended(bus, config, make_trajectory):
    await publish(bus, make_trajectory, range(5))
    await bus.publish(bus.topology.control("end"), encode(EndRecord(writer="b/1", reason="steps", depth=3)))
    async with running(config) as process:
        output, _ = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0, output.decode()
    assert (await bus.last(CONTROL, bus.topology.control("end"))) is not None
    assert await scores(bus) == {(group, 0): float(group) for group in range(5)}


async def test_drained_it_finishes_what_it_has_in_hand(bus, config, make_trajectory):
    await publish(bus, make_trajectory, range(60))
    async with running(config, TOWLINE_REWARD__FUNCTION="my_rewards:slow", TOWLINE_REWARD__CONCURRENCY="4") as process:
        await until_scored(bus, 4)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60.0) == 0
    assert len(await scores(bus)) == 60


async def test_its_status_says_what_it_did(bus, config, make_trajectory):
    await publish(bus, make_trajectory, range(3))
    async with running(config) as process:
        await until_scored(bus, 3)
        async with asyncio.timeout(10):
            while True:
                found = decode_statuses(await bus.kv(STATUS).items())
                if found and found[0].figures.get("scored") == 3:
                    break
                await asyncio.sleep(0.1)
    (status,) = found
    assert (status.service, status.replica, status.pid, status.ready) == ("reward", "0", process.pid, True)
    assert status.figures["reward_mean"] == 1.0
    assert status.figures["failed"] == 0


async def test_a_misspelt_reward_is_one_line_and_exit_2(config):
    async with running(config, TOWLINE_REWARD__FUNCTION="my_rewards:qiuck") as process:
        output, _ = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert output.decode().strip().splitlines()[-1] == (
        "import: reward.function = 'my_rewards:qiuck': module 'my_rewards' has no 'qiuck'"
    )
    assert "Traceback" not in output.decode()
