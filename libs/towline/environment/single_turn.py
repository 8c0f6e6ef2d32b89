"""The trivial environment: the prompt, one answer, the end."""

from __future__ import annotations

from typing import Literal

from towline.contract.task import Task
from towline.environment.base import Step

_DONE = Step(done=True)


class SingleTurn:
    """The task's prompt, and done after the policy's first turn."""

    def reset(self, task: Task) -> list[int]:
        tokens: list[int] = task.prompt_tokens.tolist()
        return tokens

    def step(self, tokens: list[int], finish: Literal["stop", "length"]) -> Step:
        return _DONE
