"""The simulator's samples are those of a load test with the same seed: what engine and agent make of the buffer's tasks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from towline.buffer.view import seed_of
from towline.contract.task import TRAIN, Cursor, PromptRef, SamplingParams, Task, pack_tokens
from towline.engine.base import GenerateRequest
from towline.engine.synthetic import SyntheticEngine
from towline.loadtest.scenario import load_scenario
from towline.loadtest.task import Agent
from towline.simulate.lengths import lengths_of

SEED, SIZE, MOST = 7, 4, 300


async def sample(engine: SyntheticEngine, agent: Agent | None, group: int, index: int) -> int:
    """Policy tokens of one sample, as a worker's episode runs it with the task that the buffer makes."""
    sampling = SamplingParams(max_tokens=MOST, stop_token_ids=(0,))
    task = Task(
        run="r", lane=TRAIN, group=group, sample=index, group_size=SIZE, prompt=pack_tokens([5, 6]), reference={},
        prompt_ref=PromptRef("p", 0, group), cursor=Cursor(0, group), sampling=sampling, seed=seed_of(SEED, TRAIN, group, index),
        not_before_depth=0, admitted_at=0.0, deadline=1e12,
    )  # fmt: skip
    tokens = agent.reset(task) if agent is not None else task.prompt_tokens.tolist()
    policy = 0
    while True:
        done = await engine.generate(
            GenerateRequest(
                request_id=f"{group}.{index}.{policy}", tokens=tokens, sampling=sampling, seed=task.seed, position0=policy
            )
        )
        policy += len(done.tokens)
        if agent is None or (step := await agent.step(done.tokens, done.finish)).done:
            return policy
        tokens = [*tokens, *done.tokens, *step.tokens]


@pytest.mark.parametrize(
    ("arguments", "agent"),
    [
        ({"mean_tokens": 60, "sigma": 0.8}, None),
        ({"lengths": [3, 30, 400]}, None),
        ({"mean_tokens": 40, "sigma": 0.8}, {"load.agent_turns": 3.0, "load.tool_tokens": 11}),
        ({"mean_tokens": 40, "sigma": 0.8}, {"load.agent_turns": 3.0, "load.tool_tokens": 11, "load.tool_seconds": 0.001}),
    ],
    ids=["one turn", "from a list", "agent", "agent with slow tools"],
)
async def test_lengths_are_the_engines(tmp_path: Path, arguments: dict[str, Any], agent: dict[str, Any] | None) -> None:
    path = tmp_path / "s.toml"
    path.write_text("")
    scenario = load_scenario(path, {"rollout.arguments": arguments, "sampling.max_tokens": MOST, **(agent or {})})
    lengths = lengths_of(scenario)
    drawn = [[one.tokens for one in lengths.group(number, SIZE, SEED)] for number in range(40)]
    engine = SyntheticEngine(slots=SIZE, max_context_tokens=10_000, **arguments)
    await engine.start(Path(), 0)
    made = [
        [
            await sample(engine, Agent(**scenario.settings.prompts.environment_arguments) if agent else None, group, index)
            for index in range(SIZE)
        ]
        for group in range(40)
    ]
    await engine.stop()
    assert drawn == made
    assert max(map(max, drawn)) == MOST, "some are cut off"


def test_a_tools_time_is_the_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one group's samples: what the agent sleeps."""
    path = tmp_path / "s.toml"
    path.write_text("")
    scenario = load_scenario(path, {
        "rollout.arguments": {"mean_tokens": 20, "sigma": 0.1}, "sampling.max_tokens": MOST, "load.agent_turns": 4.0,
        "load.tool_seconds": 0.5})  # fmt: skip
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def all_of_them() -> list[float]:
        engine = SyntheticEngine(slots=SIZE, max_context_tokens=10_000, mean_tokens=20, sigma=0.1)
        await engine.start(Path(), 0)
        found = []
        for index in range(SIZE):
            slept.clear()
            await sample(engine, Agent(**scenario.settings.prompts.environment_arguments), 3, index)
            found.append(sum(seconds for seconds in slept if seconds))
        await engine.stop()
        return found

    monkeypatch.setattr("towline.loadtest.task.asyncio.sleep", sleep)
    assert [one.tool_seconds for one in lengths_of(scenario).group(3, SIZE, SEED)] == pytest.approx(asyncio.run(all_of_them()))
