"""examples/calculator by `towline up`: what the calculator says stands in the samples, and the policy isn't trained on it."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from live.worker.conftest import Start
from live.worker.world import World
from support.waiting import until
from towline.bus.topology import TRAJECTORY
from towline.config import PromptSettings
from towline.contract.task import PromptRef, SamplingParams, pack_tokens
from towline.contract.trajectory import Trajectory, decode_trajectory
from towline.environment.calculator import calculate
from towline.environment.tool_use import ToolRefused
from towline.local.access import open_run
from towline.local.cleanup import end_leftovers
from towline.local.run_directory import RunDirectory
from towline.store.versions import seed_base
from towline.verifiers.base import Reward, Sample

EXAMPLE = Path(__file__).parents[3] / "examples" / "calculator" / "run.toml"
SETTINGS = {
    "run.steps": "3",
    "buffer.group_size": "4",
    "buffer.groups_per_batch": "8",
    "eval.every": "3",
    "eval.prompts": "16",
    "model.arguments": "{layers = 1, hidden = 48, warm_up_steps = 150}",
    "rollout.partial_every_tokens": "4",
}
EOS, CALL, END_CALL, RESULT, END_RESULT = 2, 3, 4, 5, 6
CHARACTERS = "0123456789+="


async def test_a_worker_s_samples_hold_the_calculator_s_answers_and_are_scored(
    world: World, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    sums: Any = importlib.import_module("sums")
    folder = world.folder / "base"
    await asyncio.to_thread(sums.build_model, folder, 0, layers=1, hidden=48, warm_up_steps=80)
    await asyncio.to_thread(seed_base, world.objects, world.log, folder, "sums", None, None)
    world.open(0)
    prompts = PromptSettings(
        source="sums:train_prompts", environment="towline.environment.calculator:Calculator",
        environment_arguments={"max_calls": 2},
    )  # fmt: skip
    plain = world.settings
    monkeypatch.setattr(world, "settings", lambda **settings: plain(**settings).model_copy(update={"prompts": prompts}))
    await start(max_context_tokens=64, partial_every_tokens=4)
    source = sums.train_prompts(None, 0)
    sampling = SamplingParams(max_tokens=24, stop_token_ids=(EOS, END_CALL))
    for group in range(40):
        prompt = source.get(0, group)
        await world.task(
            group, prompt=pack_tokens(prompt.tokens), prompt_ref=PromptRef("sums", 0, group), reference=prompt.reference,
            environment=prompts.environment, sampling=sampling,
        )  # fmt: skip

    async def all_there() -> bool:
        return len(await world.trajectories()) == 40

    await until(all_there, 60.0)
    assert await world.failures() == []
    trajectories = list((await world.trajectories()).values())
    used = [trajectory for trajectory in trajectories if any(segment.kind == "tool" for segment in trajectory.segments)]
    assert len(used) > 20
    for trajectory in used:
        assert_answered(trajectory)
    rewards = [sums.reward(sample_of(trajectory)) for trajectory in trajectories]
    assert {type(reward) for reward in rewards} == {Reward}
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        calls = [text(trajectory.tokens[s.start + 1 : s.end - 1].tolist()) for s in trajectory.segments if s.kind == "tool"]
        assert reward.components["called"] == float(bool(calls) and calls[-1] == trajectory.reference["value"])


def test_the_reward_heeds_what_the_calculator_said_and_not_what_the_policy_says_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    sums: Any = importlib.import_module("sums")

    def score(*turns: tuple[list[int], int], finish: Any = "stop") -> tuple[float, float]:
        reward = sums.reward(
            Sample(
                prompt_tokens=np.zeros(1, np.int32), response_tokens=np.array([t for turn, _ in turns for t in turn], np.int32),
                policy_mask=np.array([mine for turn, mine in turns for _ in turn], np.uint8), finish=finish,
                reference={"sum": "37+45", "value": "82"}, prompt_ref=PromptRef("s", 0, 0), group=1, sample=0,
                tokenizer=None,  # type: ignore[arg-type]
            )
        )  # fmt: skip
        return reward.value, reward.components["exact"]

    call, said = ([CALL, *sums.encode("37+45"), END_CALL], 1), ([RESULT, *sums.encode("82"), END_RESULT], 0)
    assert score(call, said, ([*sums.encode("82"), EOS], 1)) == (1.0, 1.0)
    assert score(call, said, ([*sums.encode("87"), EOS], 1)) == (0.75, 0.0)
    assert score(call, said, (sums.encode("82"), 1), finish="length") == (0.5, 0.0)
    assert score(call, said) == (0.5, 0.0)
    assert score(call, ([RESULT, *sums.encode("9"), END_RESULT], 0), ([*sums.encode("82"), EOS], 1)) == (0.5, 0.0)
    assert score(call, ([RESULT, END_RESULT], 0), ([EOS], 1)) == (0.0, 0.0)
    faked = ([RESULT, *sums.encode("82"), END_RESULT, *sums.encode("82"), EOS], 1)
    assert score(faked) == (0.0, 0.0)
    assert score(([END_RESULT, EOS], 1)) == (0.0, 0.0)


@pytest.mark.slow
def test_a_run_of_samples_that_use_a_tool(tmp_path: Path) -> None:
    arguments = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    settings = [*arguments, "--set", f"store.url={(tmp_path / 'store').as_uri()}"]
    command = [sys.executable, "-m", "towline.cli.main", "up", str(EXAMPLE), "--run", "sums", *settings, "--json"]
    directory = RunDirectory(tmp_path / "runs" / "sums")
    try:
        done = subprocess.run(command, cwd=tmp_path, env=os.environ, text=True, capture_output=True, timeout=280)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        trajectories = asyncio.run(read(directory))
    finally:
        if directory.path.is_dir():
            end_leftovers(directory)
    assert answer["audit"]["violations"] == []
    assert answer["summary"]["samples"]["trained"] == 3 * 32
    assert len(trajectories) >= 96
    used = [trajectory for trajectory in trajectories if any(segment.kind == "tool" for segment in trajectory.segments)]
    assert len(used) > len(trajectories) / 2, "its warm-up taught the model what a call looks like"
    for trajectory in used:
        assert_answered(trajectory)


def assert_answered(trajectory: Trajectory) -> None:
    """Each call is followed by what the calculator says to it, which the policy didn't choose."""
    kinds = [segment.kind for segment in trajectory.segments]
    assert kinds == (["prompt"] + ["policy", "tool"] * len(kinds))[: len(kinds)]
    for turn, answer in zip(trajectory.segments[1::2], trajectory.segments[2::2], strict=False):
        call = trajectory.tokens[turn.start : turn.end].tolist()
        said = trajectory.tokens[answer.start : answer.end].tolist()
        assert (call[-1], said[0], said[-1]) == (END_CALL, RESULT, END_RESULT)
        assert not trajectory.loss_mask[answer.start : answer.end].any()
        if CALL in call:
            expression = text(call[len(call) - call[::-1].index(CALL) : -1])
            try:
                assert text(said[1:-1]) == calculate(expression)
            except ToolRefused:
                continue


def sample_of(trajectory: Trajectory) -> Sample:
    prompt = trajectory.segments[0].end
    return Sample(
        prompt_tokens=trajectory.tokens[:prompt], response_tokens=trajectory.tokens[prompt:], finish=trajectory.finish,
        policy_mask=np.asarray(trajectory.loss_mask[prompt:]), reference=trajectory.reference, prompt_ref=trajectory.prompt_ref,
        tokenizer=None,  # type: ignore[arg-type]
        group=trajectory.group, sample=trajectory.sample,
    )  # fmt: skip


def text(tokens: list[int]) -> str:
    return "".join(CHARACTERS[token - 7] for token in tokens if token >= 7)


async def read(directory: RunDirectory) -> list[Trajectory]:
    async with open_run(directory, directory.load()) as access:
        return [decode_trajectory(message.data) async for message in access.bus.read(TRAJECTORY, follow=False)]
