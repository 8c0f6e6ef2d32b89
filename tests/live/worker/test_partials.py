"""No token is lost with a worker: whoever gets its task goes on from the sample's PARTIAL; the trajectory says whose is what."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from live.worker.conftest import Start
from live.worker.environments import Counting
from live.worker.test_process import TOML
from live.worker.world import World
from support.waiting import until
from towline.bus.topology import DEAD, PARTIAL
from towline.config import BusSettings
from towline.contract.partial import Partial, decode_partial, encode_partial
from towline.contract.task import SamplingParams
from towline.contract.trajectory import Trajectory
from towline.engine.base import GenerateRequest, Generation
from towline.engine.torch_batch import TorchBatch
from towline.engine.torch_engine import TorchEngine
from unit.engine.models import make_model, plain_logprobs, save

FIVE_HUNDRED = SamplingParams(max_tokens=500)
PROMPT = [3, 1, 4]
"""Of the world's task of sample 0."""


@pytest.fixture(autouse=True)
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 tokens take seconds without work for the machine, so that something can happen meanwhile."""
    step = TorchBatch.step

    def slow_step(batch: TorchBatch) -> None:
        time.sleep(0.004)
        step(batch)

    monkeypatch.setattr(TorchBatch, "step", slow_step)


@pytest.fixture
async def undisturbed(tmp_path: Path) -> AsyncIterator[Any]:
    """What version 0 generates when nobody dies."""
    engine = TorchEngine(slots=4, max_context_tokens=2048)
    await engine.start(save(make_model("qwen3-tied", 0, context=2048), tmp_path / "alone"), 0)

    async def generate(seed: int, sampling: SamplingParams, tokens: list[int], position0: int = 0) -> Generation:
        return await engine.generate(
            GenerateRequest(request_id=f"{seed}", tokens=tokens, sampling=sampling, seed=seed, position0=position0)
        )

    yield generate
    await engine.stop()


def begin(world: World, bus_settings: BusSettings, replica: str, *, die_at: int | None = None) -> Any:
    config = world.folder / "run.toml"
    text = TOML.format(
        run=world.run, folder=world.folder / "runs", url=bus_settings.url, budget=bus_settings.budget_bytes,
        store=(world.folder / "store").as_uri(), engine="torch",
    )  # fmt: skip
    settings = "ack_wait_seconds = 2.0\npartial_every_tokens = 100\npoll_seconds = 0.1"
    config.write_text(text.replace("[rollout]", f"[rollout]\n{settings}") + "[buffer]\nmax_staleness = 1\n")
    module = ["towline.rollout_worker"] if die_at is None else ["live.worker.dying", str(die_at)]
    return asyncio.create_subprocess_exec(
        sys.executable, "-m", *module, "--config", str(config), "--replica", replica,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent.parent)},
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip


async def partial_of(world: World, group: int, sample: int = 0) -> Partial:
    message = await world.bus.last(PARTIAL, world.bus.topology.partial(group, sample))
    assert message is not None, "nothing was written down"
    return decode_partial(message.data)


def assert_whole(world: World, trajectory: Trajectory) -> None:
    """Every policy token has the logprob that the version of its span gives it, in one plain forward of everything."""
    tokens = trajectory.tokens.tolist()
    covered = np.zeros(len(tokens), bool)
    for span in trajectory.version_spans:
        want = plain_logprobs(world.models[span.version], tokens)[span.start - 1 : span.end - 1]
        np.testing.assert_allclose(trajectory.logprobs[span.start : span.end], want, rtol=0, atol=1e-5)
        covered[span.start : span.end] = True
    assert covered.tolist() == trajectory.loss_mask.astype(bool).tolist()


async def test_a_generation_killed_at_token_400_of_500_goes_on_on_another_worker_under_its_newer_version(
    world: World, bus_settings: BusSettings, undisturbed: Any
) -> None:
    world.seed()
    first = await begin(world, bus_settings, "one", die_at=400)
    second = None
    try:
        await world.served(0, "one", seconds=60.0)
        await world.task(1, sampling=FIVE_HUNDRED)
        assert await asyncio.wait_for(first.wait(), 60.0) == -signal.SIGKILL
        partial = await partial_of(world, 1)
        assert partial.policy_tokens in (100, 200, 300), "what stood at token 400 wasn't written yet"
        newer = world.commit(1)
        second = await begin(world, bus_settings, "two")
        trajectory = await world.trajectory(1, seconds=60.0)
    finally:
        for process in (first, second):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
    cut = len(PROMPT) + partial.policy_tokens
    assert (trajectory.replica, trajectory.policy_tokens, trajectory.finish) == ("two", 500, "length")
    assert [(span.start, span.end, span.version, span.cut) for span in trajectory.version_spans] == [
        (3, cut, 0, "start"), (cut, 503, newer, "retract")
    ]  # fmt: skip
    assert trajectory.tokens[:cut].tolist() == partial.tokens.tolist()
    assert trajectory.logprobs[:cut].tobytes() == partial.logprobs.tobytes()
    assert_whole(world, trajectory)
    alone = await undisturbed(100, FIVE_HUNDRED, PROMPT)
    assert trajectory.tokens[3:cut].tolist() == alone.tokens[: cut - 3]


async def test_a_drained_worker_hands_over_every_token_and_the_next_one_ends_as_if_nothing_had_been(
    world: World, start: Start, undisturbed: Any
) -> None:
    world.seed()
    sampling = SamplingParams(max_tokens=250)
    first = await start("a", partial_every_tokens=20)
    await world.task(1, sampling=sampling)
    await world.task(2, sampling=SamplingParams(max_tokens=8), not_before_depth=3)
    await until(lambda: _has_tokens(world, 1, 60))
    first.worker.drain()
    assert await asyncio.wait_for(first.ended, 60.0) == "drained"
    partial = await partial_of(world, 1)
    assert 60 <= partial.policy_tokens < 250, "generated in a second"
    assert (partial.starts, first.worker.figures.handed_over) == (0, 2)
    second = await start("b", partial_every_tokens=20)
    trajectory = await world.trajectory(1, seconds=30.0)
    alone = await undisturbed(100, sampling, PROMPT)
    assert trajectory.tokens.tolist() == PROMPT + alone.tokens
    np.testing.assert_allclose(trajectory.logprobs[3:], alone.logprobs, rtol=0, atol=1e-5)
    assert [(span.start, span.end, span.version, span.cut) for span in trajectory.version_spans] == [(3, 253, 0, "start")]
    assert_whole(world, trajectory)
    figures = second.worker.figures.partials
    assert (figures.resumed, figures.tokens_resumed) == (1, partial.policy_tokens)
    await until(lambda: _nothing_left(world, 1))


async def test_a_re_issue_goes_on_from_what_the_attempt_before_it_left(world: World, start: Start) -> None:
    world.seed()
    await start(partial_every_tokens=20)
    await world.task(1, sampling=SamplingParams(max_tokens=250))
    await until(lambda: _has_tokens(world, 1, 60))
    before = await partial_of(world, 1)
    await world.cancel(1, 0, before.task_sequence)
    await until(lambda: _acked(world))
    sequence = await world.task(1, sampling=SamplingParams(max_tokens=250), attempt=1)
    trajectory = await world.trajectory(1)
    assert (trajectory.task_sequence, trajectory.attempt) == (sequence, 1)
    assert trajectory.tokens[: before.tokens.size].tolist() == before.tokens.tolist()
    assert_whole(world, trajectory)


async def test_a_partial_that_can_not_be_trusted_is_counted_kept_in_dead_and_begun_anew(world: World, start: Start) -> None:
    world.seed()
    first = await start("a", partial_every_tokens=20)
    await world.task(1, sampling=SamplingParams(max_tokens=250))
    await until(lambda: _has_tokens(world, 1, 40))
    first.worker.drain()
    await first.ended
    good = encode_partial(await partial_of(world, 1))
    spoiled = good[:-40] + bytes([good[-40] ^ 1]) + good[-39:]
    await world.bus.publish(world.bus.topology.partial(1, 0), spoiled)
    second = await start("b")
    trajectory = await world.trajectory(1)
    assert trajectory.policy_tokens == 250
    assert_whole(world, trajectory)
    figures = second.worker.figures.partials
    assert (figures.refused, figures.resumed) == ({"malformed": 1}, 0)
    dead = await world.bus.last(DEAD, world.bus.topology.dead("partial"))
    assert dead is not None
    assert dead.data == spoiled


async def test_a_partial_that_can_not_be_fresh_any_more_or_is_another_task_s_is_not_gone_on_from(
    world: World, start: Start
) -> None:
    world.seed()
    first = await start("a", partial_every_tokens=20)
    for group in (1, 2):
        await world.task(group, sampling=SamplingParams(max_tokens=250))
        await until(lambda group=group: _has_tokens(world, group, 40))  # type: ignore[misc]
    first.worker.drain()
    await first.ended
    strange = replace(await partial_of(world, 2), seed=12345)
    await world.bus.publish(world.bus.topology.partial(2, 0), encode_partial(strange))
    newest = [world.commit(seed) for seed in (1, 2)][-1]
    second = await start("b")
    for group in (1, 2):
        trajectory = await world.trajectory(group, seconds=30.0)
        assert {span.version for span in trajectory.version_spans} == {newest}
    assert second.worker.figures.partials.refused == {"stale": 1, "foreign": 1}
    assert second.worker.figures.partials.resumed == 0


@pytest.mark.parametrize("off_line", ["drop", "keep"])
async def test_after_a_fork_what_was_sampled_off_the_line_is_gone_on_from_only_where_it_may_be_kept(
    world: World, start: Start, off_line: str
) -> None:
    world.seed()
    left = world.commit(1)
    first = await start("a", partial_every_tokens=20)
    await world.served(left, "a")
    await world.task(1, sampling=SamplingParams(max_tokens=250))
    await until(lambda: _has_tokens(world, 1, 40))
    first.worker.drain()
    await first.ended
    world.open(0)
    second = await start("b", buffer={"off_line": off_line})
    trajectory = await world.trajectory(1, seconds=30.0)
    assert [span.version for span in trajectory.version_spans] == ([0] if off_line == "drop" else [left, 0])
    assert_whole(world, trajectory)
    figures = second.worker.figures.partials
    assert (figures.refused, figures.resumed) == (({"off_line": 1}, 0) if off_line == "drop" else ({}, 1))


async def test_a_partial_that_is_too_large_for_a_message_goes_by_the_store(world: World, start: Start) -> None:
    world.seed()
    first = await start("a", partial_every_tokens=0)
    stops = SamplingParams(max_tokens=250, stop_token_ids=tuple(range(0, 61, 20)))
    await world.task(1, environment="live.worker.environments:Bulky", sampling=stops)
    await until(lambda: _has_tokens(world, 1, 40))
    first.worker.drain()
    await first.ended
    partial = await partial_of(world, 1)
    assert partial.environment_state is not None
    assert len(partial.environment_state) > world.bus.max_payload
    second = await start("b", partial_every_tokens=0)
    assert (await world.trajectory(1, seconds=30.0)).replica == "b"
    assert second.worker.figures.partials.tokens_resumed == partial.policy_tokens


@pytest.mark.parametrize("environment", ["Counting", "Saving"])
async def test_a_sample_of_several_turns_goes_on_with_its_environment_where_it_was(
    world: World, start: Start, environment: str
) -> None:
    """`Counting` says how often it was called, and can't save: it's brought there by the turns. `Saving` saves."""
    world.seed()
    limit = SamplingParams(max_tokens=250, stop_token_ids=tuple(range(0, 61, 20)))
    first = await start("a", partial_every_tokens=20)
    name = f"live.worker.environments:{environment}"
    await world.task(1, environment=name, sampling=limit)
    await until(lambda: _has_tokens(world, 1, 80))
    first.worker.drain()
    await first.ended
    partial = await partial_of(world, 1)
    answers = sum(segment.kind == "tool" for segment in partial.segments)
    assert answers >= 2
    assert (partial.environment_state is None) == (environment == "Counting")
    second = await start("b", partial_every_tokens=20)
    trajectory = await world.trajectory(1, seconds=30.0)
    assert second.worker.figures.partials.tokens_resumed == partial.policy_tokens
    tools = [trajectory.tokens[s.start : s.end].tolist() for s in trajectory.segments if s.kind == "tool"]
    assert tools == [Counting.says(turn) for turn in range(1, len(tools) + 1)]
    kinds = [segment.kind for segment in trajectory.segments]
    assert kinds == (["prompt"] + ["policy", "tool"] * len(kinds))[: len(kinds)]
    assert_whole(world, trajectory)


async def _has_tokens(world: World, group: int, tokens: int) -> bool:
    message = await world.bus.last(PARTIAL, world.bus.topology.partial(group, 0))
    return message is not None and decode_partial(message.data).policy_tokens >= tokens


async def _nothing_left(world: World, group: int) -> bool:
    return (await partial_of(world, group)).tokens.size == 0


async def _acked(world: World) -> bool:
    return await world.unacked() == (0, 0)
