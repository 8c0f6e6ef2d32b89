"""Deadlines end a sample with what it has, as `deadline`, and long work keeps its delivery."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from live.worker.conftest import Start
from live.worker.world import World
from support.waiting import until
from towline.contract.task import SamplingParams
from towline.contract.trajectory import Trajectory
from towline.engine.torch_batch import TorchBatch
from unit.engine.models import plain_logprobs

LONG = SamplingParams(max_tokens=1500)


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token takes 5 ms at least."""
    step = TorchBatch.step

    def slow_step(batch: TorchBatch) -> None:
        time.sleep(0.005)
        step(batch)

    monkeypatch.setattr(TorchBatch, "step", slow_step)


def assert_cut_off(world: World, trajectory: Trajectory, most: int) -> None:
    assert trajectory.finish == "deadline"
    assert 0 < trajectory.policy_tokens < most
    want = np.array(plain_logprobs(world.models[0], trajectory.tokens.tolist()))
    chosen = np.flatnonzero(trajectory.loss_mask)
    np.testing.assert_allclose(trajectory.logprobs[chosen], want[chosen - 1], rtol=0, atol=1e-5)


@pytest.mark.usefixtures("slowly")
async def test_a_turn_past_its_deadline_ends_the_sample_with_what_it_has(world: World, start: Start) -> None:
    world.seed()
    await start(turn_seconds=0.5)
    await world.task(1, sampling=LONG)
    trajectory = await world.trajectory(1)
    assert_cut_off(world, trajectory, 1500)
    assert trajectory.segments[-1].kind == "policy"


@pytest.mark.usefixtures("slowly")
async def test_a_group_s_deadline_less_its_margin_ends_what_still_runs(world: World, start: Start) -> None:
    world.seed()
    await start(group_margin_seconds=10.0)
    await world.served(0)
    await world.task(1, sampling=LONG, admitted_at=time.time() - 1000.0, deadline=time.time() + 11.0)
    await world.task(3, sampling=SamplingParams(max_tokens=8), deadline=time.time() + 9.0)
    await world.task(2, sampling=LONG, deadline=time.time() + 600.0)
    assert_cut_off(world, await world.trajectory(1), 1500)
    assert await world.failures() == []
    trajectories = await world.trajectories()
    assert sorted(trajectories) == [(1, 0), (3, 0)], "the other one still runs"
    assert trajectories[3, 0].finish != "deadline", "a short time has a short margin"


async def test_a_tool_past_its_deadline_ends_the_sample_after_the_policy_s_turn(world: World, start: Start) -> None:
    world.seed()
    await start(tool_seconds=0.2)
    await world.task(1, environment="live.worker.environments:Hanging", sampling=SamplingParams(max_tokens=40))
    trajectory = await world.trajectory(1)
    assert (trajectory.finish, [segment.kind for segment in trajectory.segments]) == ("deadline", ["prompt", "policy"])
    assert trajectory.policy_tokens == 40


async def test_an_environment_that_does_not_begin_in_time_is_a_failed_attempt(world: World, start: Start) -> None:
    world.seed()
    await start(tool_seconds=0.2)
    await world.task(1, environment="live.worker.environments:NeverReady")
    failure = await world.failure()
    assert (failure.stage, failure.final) == ("environment", False)
    assert "rollout.tool_seconds" in failure.reason


async def test_tools_that_are_used_up_end_the_sample_as_tool_limit(world: World, start: Start) -> None:
    world.seed()
    await start()
    stops = SamplingParams(max_tokens=400, stop_token_ids=tuple(range(0, 61, 3)))
    await world.task(1, environment="live.worker.environments:Echo", sampling=stops)
    trajectory = await world.trajectory(1)
    assert trajectory.finish == "tool_limit"
    assert [segment.kind for segment in trajectory.segments] == ["prompt", *["policy", "tool"] * 3, "policy"]
    assert np.isnan(trajectory.logprobs[trajectory.loss_mask == 0]).all()


@pytest.mark.usefixtures("slowly")
async def test_work_that_takes_longer_than_the_ack_wait_stays_with_its_worker(world: World, start: Start) -> None:
    world.seed()
    first = await start("a", ack_wait_seconds=1.0)
    await world.served(0, "a")
    await world.task(1, sampling=SamplingParams(max_tokens=500))
    await until(lambda: first.worker.busy == 1)
    second = await start("b", ack_wait_seconds=1.0)
    began = asyncio.get_running_loop().time()
    trajectory = await world.trajectory(1, seconds=40.0)
    assert asyncio.get_running_loop().time() - began > 1.5, "it took longer than the ack wait"
    assert trajectory.replica == "a"
    assert second.worker.busy == 0
    assert second.worker.figures.superseded == 0
