"""Prompts and reward of the agent example. The services that use them start without torch.

"37+45" is asked; a call of the calculator is to come, and after its answer the sum alone.
"""

from __future__ import annotations

import random
from typing import Any

from towline.contract.task import PromptRef
from towline.environment.prompts import Prompt
from towline.verifiers.base import Reward, Sample

OPENS, CLOSES = "<tool_call>", "</tool_call>"
CALL, END_CALL = '{"name": "calculator", "arguments": {"expression": "', '"}}'
TOKENS = (
    "<|pad|>", "<|im_start|>", "<|im_end|>", "system\n", "user\n", "assistant\n", "tool\n", "\n", OPENS, CLOSES, CALL, END_CALL,
    *"0123456789+",
)  # fmt: skip
"""The whole vocabulary, each with its place as its ID; what isn't there is <|pad|>."""
ID = {token: number for number, token in enumerate(TOKENS)}
START, END = ID["<|im_start|>"], ID["<|im_end|>"]


def spell(text: str) -> list[int]:
    """Digits and +, one token each."""
    return [ID[letter] for letter in text]


def question(numbers: random.Random) -> tuple[str, str]:
    """A sum of two two-digit numbers as text, and its value."""
    left, right = numbers.randrange(10, 100), numbers.randrange(10, 100)
    return f"{left}+{right}", str(left + right)


class Sums:
    """`rows` sums a pass."""

    def __init__(self, seed: int, rows: int) -> None:
        self._seed, self._rows = seed, rows

    def __len__(self) -> int:
        return self._rows

    def get(self, epoch: int, position: int) -> Prompt:
        text, value = question(random.Random(f"agent/{self._seed}/{epoch}/{position}"))
        asked = [START, ID["user\n"], *spell(text), END, ID["\n"], START, ID["assistant\n"]]
        return Prompt(tokens=asked, ref=PromptRef("sums", epoch, position), reference={"question": text, "value": value})


def prompts(tokenizer: Any, seed: int, rows: int = 100_000) -> Sums:
    """`prompts.source`. The IDs are fixed, so the tokenizer isn't needed."""
    return Sums(seed, rows)


def reward(sample: Sample) -> Reward:
    """Half for a call that got the sum's value out of the calculator, half for the share of its digits in the last answer."""
    tokens, mine, value = sample.response_tokens.tolist(), sample.policy_mask.tolist(), spell(sample.reference["value"])
    turns = _turns(tokens, mine)
    if len(turns) < 3:
        return Reward(0.0, {"called": 0.0, "exact": 0.0})
    told, answer = turns[-2], turns[-1]
    # What the agent writes between two answers: the end of the line, the tool's message, the beginning of the next answer.
    called = float([START, ID["tool\n"], *value, END] == told[1 : len(value) + 4])
    ended = sample.finish == "stop" and answer[-1] == END and len(answer) - 1 <= len(value)
    right = sum(got == digit for got, digit in zip(answer[:-1], value, strict=False)) / len(value) if ended else 0.0
    return Reward(0.5 * called + 0.5 * right, {"called": called, "exact": float(called and right == 1.0)})


def _turns(tokens: list[int], mine: list[int]) -> list[list[int]]:
    """The policy's turns and, between them, what came from outside."""
    found: list[list[int]] = []
    for place, token in enumerate(tokens):
        if place == 0 or mine[place] != mine[place - 1]:
            found.append([])
        found[-1].append(token)
    return found
