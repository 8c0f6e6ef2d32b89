"""A game of several turns: the policy guesses a whole number and is told higher or lower, until it's right or out of turns.

The number to be found is the task's `reference["secret"]`; prompts say what the game is.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from towline.contract.task import Task
from towline.environment.base import Step
from towline.environment.text import decode, encode

_NUMBER = re.compile(r"-?\d+")


class Guessing:
    """The last number of a turn is the guess. `answer` is what is said after each turn, `{}` standing for the word: for a chat
    model it holds the template's tokens between two turns."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_turns: int = 8,
        answer: str = "{}",
        higher: str = "higher",
        lower: str = "lower",
        unreadable: str = "a number, please",
    ) -> None:
        self._tokenizer, self._max_turns = tokenizer, max_turns
        self._answer, self._higher, self._lower, self._unreadable = answer, higher, lower, unreadable
        self._secret = self._turns = 0

    def reset(self, task: Task) -> list[int]:
        self._secret = int(task.reference["secret"])
        tokens: list[int] = task.prompt_tokens.tolist()
        return tokens

    def step(self, tokens: list[int], finish: Literal["stop", "length"]) -> Step:
        self._turns += 1
        numbers = _NUMBER.findall(decode(self._tokenizer, tokens))
        # Longer ones are no guesses, and int() would take its time.
        guess = int(numbers[-1]) if numbers and len(numbers[-1]) <= 30 else None
        if guess == self._secret or finish == "length":
            return Step(done=True, info={"turns": self._turns})
        if self._turns >= self._max_turns:
            return Step(done=True, limit_reached=True, info={"turns": self._turns})
        word = self._unreadable if guess is None else self._higher if guess < self._secret else self._lower
        return Step(tokens=encode(self._tokenizer, self._answer.replace("{}", word)), done=False)

    def save(self) -> bytes:
        return msgspec.msgpack.encode(self._turns)

    def restore(self, task: Task, saved: bytes) -> None:
        self._secret, self._turns = int(task.reference["secret"]), msgspec.msgpack.decode(saved, type=int)
