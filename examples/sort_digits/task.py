"""Prompts and reward, on token IDs.

Prompts are a function of (seed, epoch, position). Which digit strings are held out for evaluation is a property of the
string itself, so no training prompt can ever equal a held-out one, whatever the seeds.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Sequence
from typing import Any

from towline.contract.task import PromptRef
from towline.environment.prompts import Prompt
from towline.errors import UsageError
from towline.verifiers.base import Reward, Sample

PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "0123456789>"
DIGITS = 5
HELD_OUT_SHARE = 64
"""One digit string in so many is held out."""

_ID = {character: len(SPECIAL_TOKENS) + index for index, character in enumerate(CHARACTERS)}


def encode(text: str) -> list[int]:
    """One token a character."""
    return [_ID[character] for character in text]


def held_out(digits: str) -> bool:
    return zlib.crc32(digits.encode()) % HELD_OUT_SHARE == 0


def draw(random_numbers: random.Random) -> str:
    """A digit string to train on."""
    while held_out(digits := "".join(random_numbers.choices("0123456789", k=DIGITS))):
        pass
    return digits


class TrainPrompts:
    """`rows` prompts a pass, drawn anew in each: (seed, epoch, position) gives the same prompt always."""

    def __init__(self, seed: int, rows: int) -> None:
        self._seed, self._rows = seed, rows

    def __len__(self) -> int:
        return self._rows

    def get(self, epoch: int, position: int) -> Prompt:
        digits = draw(random.Random(f"sort-digits/{self._seed}/{epoch}/{position}"))
        return _prompt("sort-digits", epoch, position, digits)


class EvalPrompts:
    """Distinct held-out digit strings, the same for every version and run with this seed."""

    def __init__(self, seed: int, rows: int) -> None:
        strings = ["".join(digits) for digits in itertools.product("0123456789", repeat=DIGITS)]
        strings = [digits for digits in strings if held_out(digits)]
        if rows > len(strings):
            raise UsageError(f"prompts.eval_arguments.rows = {rows}: there are {len(strings)} held-out strings", code="prompts")
        random.Random(f"sort-digits/held-out/{seed}").shuffle(strings)
        self._strings = strings[:rows]

    def __len__(self) -> int:
        return len(self._strings)

    def get(self, epoch: int, position: int) -> Prompt:
        return _prompt("sort-digits-held-out", epoch, position, self._strings[position])


def train_prompts(tokenizer: Any, seed: int, rows: int = 100_000) -> TrainPrompts:
    """`prompts.source` of demo.toml. The IDs are fixed, so the tokenizer isn't needed."""
    return TrainPrompts(seed, rows)


def eval_prompts(tokenizer: Any, seed: int, rows: int = 256) -> EvalPrompts:
    """`prompts.eval_source` of demo.toml."""
    return EvalPrompts(seed, rows)


def reward(sample: Sample) -> Reward:
    """The share of positions that hold the right digit; 0 for an answer that is too long or never ended.

    Dense on purpose: an all-or-nothing reward is almost always 0 at the start, and GRPO learns from differences.
    """
    want = encode(sample.reference["answer"])
    answer = sample.response_tokens.tolist()
    if sample.finish != "stop" or answer[-1] != EOS or len(answer) - 1 > len(want):
        return Reward(0.0, {"exact": 0.0})
    right = sum(got == digit for got, digit in zip(answer[:-1], want, strict=False))
    return Reward(right / len(want), {"exact": float(answer[:-1] == want)})


def _prompt(source: str, epoch: int, position: int, digits: str) -> Prompt:
    tokens: Sequence[int] = [BOS, *encode(f"{digits}>")]
    return Prompt(tokens=list(tokens), ref=PromptRef(source, epoch, position), reference={"answer": "".join(sorted(digits))})
