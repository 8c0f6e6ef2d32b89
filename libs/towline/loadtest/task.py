"""The synthetic task: seeded prompts, an agent with slow tools, and a verifier that takes its time."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

from towline.contract.task import Task
from towline.engine.recording import MARK_TOKENS, marked, read_recording
from towline.environment.base import Step
from towline.environment.prompts import Shuffled
from towline.verifiers.base import Sample

VOCABULARY = 32_000


def prompts(tokenizer: Any, seed: int, tokens: int = 64, rows: int = 10_000) -> Shuffled:
    """`rows` prompts of `tokens` random tokens; the tokenizer isn't asked."""

    def make(row: int) -> tuple[list[int], dict[str, Any]]:
        chance = random.Random(f"{seed}/{row}")
        return [chance.randrange(1, VOCABULARY) for _ in range(tokens)], {"row": row}

    return Shuffled("synthetic", rows, make, seed=seed)


def recorded_prompts(tokenizer: Any, seed: int, recorded: str, rows: int = 10_000) -> Shuffled:
    """Prompts as long as those of the recorded groups, one of which stands for each row."""
    recording = read_recording(recorded)

    def make(row: int) -> tuple[list[int], dict[str, Any]]:
        chance = random.Random(f"{seed}/{row}")
        group = recording.group_of(chance)
        tokens = max(recording.groups[group][0].prompt, MARK_TOKENS)
        return [chance.randrange(1, VOCABULARY) for _ in range(tokens)], {"row": row, "recorded": group}

    return Shuffled("recorded", rows, make, seed=seed)


class RecordedAgent:
    """A recorded sample's turns and tools. Which one: the prompt's group, and of it as many as the task's group has, none twice
    while there are others. Its prompt begins with a mark, by which the synthetic engine knows it too."""

    def __init__(self, *, recorded: str) -> None:
        self._recording = read_recording(recorded)
        self._turn = 0

    def reset(self, task: Task) -> list[int]:
        recording, chance = self._recording, random.Random(f"recorded/{task.run}/{task.group}")
        group = int(task.reference.get("recorded", -1))
        if not 0 <= group < len(recording.groups):
            group = recording.group_of(chance)
        place = recording.places(group, task.group_size, chance)[task.sample]
        self._sample, self._turn = recording.groups[group][place], 0
        self._chance = random.Random(f"agent/{task.seed}/{task.attempt}")
        return marked(task.prompt_tokens.tolist(), group, place)

    async def step(self, tokens: list[int], finish: str) -> Step:
        sample, turn = self._sample, self._turn
        self._turn += 1
        if self._chance.random() < self._recording.failed_turns(len(sample.turns), environment=True):
            raise RuntimeError("a failure of the environment, as often as the recorded run had them")
        if finish == "length" or self._turn >= len(sample.turns):
            return Step(done=True, limit_reached=sample.finish == "tool_limit")
        await asyncio.sleep(sample.tool_seconds / (len(sample.turns) - 1))
        answer = [self._chance.randrange(1, VOCABULARY) for _ in range(max(sample.turns[turn].environment, 1))]
        return Step(tokens=answer, kind="tool", done=False)


class Agent:
    """Turns of the policy with tools between them: a geometric number of turns of mean `turns`, and tools whose times are
    log-normal (sigma 1) of mean `seconds`. All of it follows from the task's seed."""

    def __init__(self, *, turns: float = 4.0, seconds: float = 0.5, tokens: int = 64) -> None:
        self._turns, self._seconds, self._tokens = turns, seconds, tokens
        self._chance = random.Random(0)

    def reset(self, task: Task) -> list[int]:
        self._chance = random.Random(f"agent/{task.seed}")
        prompt: list[int] = task.prompt_tokens.tolist()
        return prompt

    async def step(self, tokens: list[int], finish: str) -> Step:
        if finish == "length" or self._chance.random() < 1 / self._turns:
            return Step(done=True)
        if self._seconds:
            await asyncio.sleep(self._chance.lognormvariate(math.log(self._seconds) - 0.5, 1.0))
        return Step(tokens=[self._chance.randrange(1, VOCABULARY) for _ in range(self._tokens)], kind="tool", done=False)


class Verifier:
    """A reward that the sample's place decides, after `seconds`: groups have an advantage, and runs can be repeated."""

    def __init__(self, *, seconds: float = 0.0) -> None:
        self._seconds = seconds

    async def __call__(self, sample: Sample) -> float:
        if self._seconds:
            await asyncio.sleep(self._seconds)
        return random.Random(f"reward/{sample.group}/{sample.sample}").random()
