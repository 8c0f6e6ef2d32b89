"""Environments that a user's own package might hold."""

from __future__ import annotations

from towline.contract.task import Task
from towline.environment.base import Step


class Echo:
    """A tool answers every stop with three sevens; the third answer is the last."""

    def __init__(self) -> None:
        self._calls = 0

    async def reset(self, task: Task) -> list[int]:
        return task.prompt_tokens.tolist()  # type: ignore[no-any-return]

    async def step(self, tokens: list[int], finish: str) -> Step:
        self._calls += 1
        if self._calls > 3:
            return Step(done=True, limit_reached=True)
        return Step(tokens=[7, 7, 7], kind="tool", done=False)


class Broken:
    """Its only tool doesn't exist."""

    def reset(self, task: Task) -> list[int]:
        return task.prompt_tokens.tolist()  # type: ignore[no-any-return]

    def step(self, tokens: list[int], finish: str) -> Step:
        raise LookupError("no such tool")
