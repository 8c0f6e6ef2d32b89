"""Sums of two numbers after two examples, as plain text: prompts, and the verifier that reads the answer's first line.

Prompts are a function of (seed, epoch, position). Which sums are held out for evaluation is a property of the two numbers, so no
training prompt can equal a held-out one. The policy ends its answer with a line break, which `sampling.stop_token_ids` names.
"""

from __future__ import annotations

import random
import re
import zlib
from typing import Any

from towline.environment.prompts import PromptSource, Shuffled
from towline.verifiers.base import Reward, Sample

HELD_OUT_SHARE = 8
"""One pair in so many is held out."""
SHOTS = 2
WELL_FORMED_SHARE = 0.2
"""What an answer that is a number and a line break gets, right or wrong."""
_LINE = re.compile(r" ?(\d+)\n")
_FIRST = re.compile(r" ?(\d+)\b")


def train_prompts(tokenizer: Any, seed: int, low: int = 1, high: int = 40) -> PromptSource:
    """`prompts.source`: every pair of numbers in [low, high] that isn't held out."""
    return _prompts("sums", tokenizer, [pair for pair in _pairs(low, high) if not held_out(pair)], seed)


def eval_prompts(tokenizer: Any, seed: int, low: int = 1, high: int = 40, rows: int = 64) -> PromptSource:
    """`prompts.eval_source`: `rows` held-out pairs, the same for every version."""
    pairs = [pair for pair in _pairs(low, high) if held_out(pair)]
    random.Random(f"sums/{seed}").shuffle(pairs)
    return _prompts("sums-held-out", tokenizer, pairs[:rows], seed, shuffle=False)


def held_out(pair: tuple[int, int]) -> bool:
    return zlib.crc32(f"{pair[0]}+{pair[1]}".encode()) % HELD_OUT_SHARE == 0


def text(pair: tuple[int, int], seed: int) -> str:
    """The prompt: `SHOTS` solved sums, drawn by the pair and the seed, then the pair's, up to the equals sign."""
    numbers = random.Random(f"shots/{seed}/{pair}")
    shots = [(numbers.randint(1, 40), numbers.randint(1, 40)) for _ in range(SHOTS)]
    return "".join(f"{a} + {b} = {a + b}\n" for a, b in shots) + f"{pair[0]} + {pair[1]} ="


def reward(sample: Sample) -> Reward:
    """0.8 for the right sum in front, and 0.2 for a number and a line break alone."""
    answer = sample.text
    first, whole = _FIRST.match(answer), _LINE.fullmatch(answer)
    right = first is not None and int(first.group(1)) == sample.reference["answer"]
    return Reward(
        (1.0 - WELL_FORMED_SHARE) * right + WELL_FORMED_SHARE * (whole is not None),
        {"right": float(right), "well_formed": float(whole is not None)},
    )


def _pairs(low: int, high: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(low, high + 1) for b in range(low, high + 1)]


def _prompts(name: str, tokenizer: Any, pairs: list[tuple[int, int]], seed: int, *, shuffle: bool = True) -> PromptSource:
    def make(index: int) -> tuple[list[int], dict[str, Any]]:
        encoded = tokenizer.encode(text(pairs[index], seed))
        return [int(token) for token in getattr(encoded, "ids", encoded)], {"answer": sum(pairs[index])}

    return Shuffled(name, len(pairs), make, seed=seed, shuffle=shuffle)
