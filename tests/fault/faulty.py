"""The demo's task with what goes wrong in life: an environment that fails, slow samples, a verifier that can't judge a group.

So a run of it has re-issues, drops, cancels and final failures at places that are known beforehand.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from sort_digits import reward as plain_reward

from towline.contract.task import TRAIN, Task
from towline.environment.base import Step
from towline.verifiers.base import Reward, Sample

FAILS_EVERY = 13
UNJUDGED_EVERY, UNJUDGED = 9, 4
"""Groups 4, 13, 22, … can't be judged: their first sample's verifier raises."""
SLOW_SECONDS = 1.0
"""How much longer the last sample of such a group takes, so that it's still at work when the group is dropped."""


def is_unjudged(group: int) -> bool:
    return group % UNJUDGED_EVERY == UNJUDGED


class Environment:
    """One turn; the first attempt fails now and then, and some samples are slow."""

    def reset(self, task: Task) -> list[int]:
        self._task = task
        if task.lane == TRAIN and not task.attempt and (7 * task.group + task.sample) % FAILS_EVERY == 0:
            raise RuntimeError("this environment fails now and then")
        tokens: list[int] = task.prompt_tokens.tolist()
        return tokens

    async def step(self, tokens: list[int], finish: Literal["stop", "length"]) -> Step:
        task = self._task
        if task.lane == TRAIN and is_unjudged(task.group) and task.sample == task.group_size - 1:
            await asyncio.sleep(SLOW_SECONDS)
        return Step(done=True)


class Slow:
    """One turn that takes its time."""

    def reset(self, task: Task) -> list[int]:
        tokens: list[int] = task.prompt_tokens.tolist()
        return tokens

    async def step(self, tokens: list[int], finish: Literal["stop", "length"]) -> Step:
        await asyncio.sleep(SLOW_SECONDS)
        return Step(done=True)


def reward(sample: Sample) -> Reward:
    """As the demo's, but for groups that it can't judge."""
    if is_unjudged(sample.group) and sample.sample == 0 and "held-out" not in sample.prompt_ref.source:
        raise RuntimeError("this group can't be judged")
    return plain_reward(sample)


def group_reward(samples: list[Sample]) -> list[Reward]:
    """The same, a whole group at a time."""
    return [reward(sample) for sample in samples]


def hopeless(sample: Sample) -> Reward:
    """As after a typing mistake in it."""
    raise RuntimeError("no sample can be judged")
