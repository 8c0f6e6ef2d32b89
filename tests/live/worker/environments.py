"""Environments that a user's own package might hold."""

from __future__ import annotations

import asyncio
import os
import signal

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


class Counting:
    """Answers every turn with how many there have been."""

    def __init__(self) -> None:
        self._turns = 0

    @staticmethod
    def says(turn: int) -> list[int]:
        return [50, turn % 50, 50]

    def reset(self, task: Task) -> list[int]:
        return task.prompt_tokens.tolist()  # type: ignore[no-any-return]

    def step(self, tokens: list[int], finish: str) -> Step:
        self._turns += 1
        return Step(tokens=self.says(self._turns), kind="tool", done=False)


class Saving(Counting):
    """The same, and able to save."""

    def save(self) -> bytes:
        return b"%d" % self._turns

    def restore(self, task: Task, saved: bytes) -> None:
        self._turns = int(saved)


class Bulky(Saving):
    """Its state is more than a message of the bus can hold."""

    def save(self) -> bytes:
        return super().save() + b" " * (9 << 20)


class Killing:
    """Takes its worker's process with it at the policy's first word."""

    def reset(self, task: Task) -> list[int]:
        return task.prompt_tokens.tolist()  # type: ignore[no-any-return]

    def step(self, tokens: list[int], finish: str) -> Step:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


class Hanging:
    """Its tool never answers."""

    def reset(self, task: Task) -> list[int]:
        return task.prompt_tokens.tolist()  # type: ignore[no-any-return]

    async def step(self, tokens: list[int], finish: str) -> Step:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class NeverReady(Hanging):
    """It doesn't even begin."""

    async def reset(self, task: Task) -> list[int]:  # type: ignore[override]
        await asyncio.Event().wait()
        raise AssertionError("unreachable")
