"""The synthetic task: seeded prompts, an agent with slow tools, and a verifier that takes its time."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

from towline.contract.task import Task
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
