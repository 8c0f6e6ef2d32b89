"""Prompts and reward of the calculator example, on token IDs, and how its model is made.

"37+45=" is to be answered "<tool>37+45</tool>"; the environment puts "<result>82</result>" behind it; "82" is to follow, and the
end. Only `build_model` needs torch, so the services that draw prompts or score samples start without it.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

from towline.contract.task import PromptRef
from towline.environment.prompts import Prompt
from towline.verifiers.base import Reward, Sample

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<tool>", "</tool>", "<result>", "</result>")
PAD, BOS, EOS, CALL, END_CALL, RESULT, END_RESULT = range(len(SPECIAL_TOKENS))
CHARACTERS = "0123456789+="
HELD_OUT_SHARE = 50
"""One sum in so many is held out."""
_ID = {character: len(SPECIAL_TOKENS) + index for index, character in enumerate(CHARACTERS)}


def encode(text: str) -> list[int]:
    """One token a character."""
    return [_ID[character] for character in text]


def held_out(text: str) -> bool:
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


def draw(numbers: random.Random, *, for_evaluation: bool = False) -> tuple[str, str]:
    """A sum of two two-digit numbers as text, and its value."""
    while True:
        left, right = numbers.randrange(10, 100), numbers.randrange(10, 100)
        if held_out(text := f"{left}+{right}") == for_evaluation:
            return text, str(left + right)


class Sums:
    """`rows` prompts a pass; (seed, epoch, position) gives the same one always. Held-out sums are for evaluation alone."""

    def __init__(self, name: str, seed: int, rows: int, *, for_evaluation: bool) -> None:
        self._name, self._seed, self._rows, self._for_evaluation = name, seed, rows, for_evaluation

    def __len__(self) -> int:
        return self._rows

    def get(self, epoch: int, position: int) -> Prompt:
        # An evaluation asks for the same sums each time.
        pass_ = 0 if self._for_evaluation else epoch
        numbers = random.Random(f"{self._name}/{self._seed}/{pass_}/{position}")
        text, value = draw(numbers, for_evaluation=self._for_evaluation)
        return Prompt(
            tokens=[BOS, *encode(f"{text}=")], ref=PromptRef(self._name, epoch, position), reference={"sum": text, "value": value}
        )


def train_prompts(tokenizer: Any, seed: int, rows: int = 100_000) -> Sums:
    """`prompts.source`. The IDs are fixed, so the tokenizer isn't needed."""
    return Sums("sums", seed, rows, for_evaluation=False)


def eval_prompts(tokenizer: Any, seed: int, rows: int = 128) -> Sums:
    """`prompts.eval_source`."""
    return Sums("sums-held-out", seed, rows, for_evaluation=True)


def reward(sample: Sample) -> Reward:
    """Half for a call that got the sum's value out of the calculator, half for the share of its digits in the answer."""
    response, mask = sample.response_tokens.tolist(), sample.policy_mask.tolist()
    value = encode(sample.reference["value"])
    if 0 not in mask:
        return Reward(0.0, {"called": 0.0, "exact": 0.0})
    # By who chose the tokens, not by what they are: the policy can write the result's own ones too.
    at = len(mask) - mask[::-1].index(0)
    begins = at - ([*mask[:at][::-1], 1].index(1))
    told, answer = response[begins + 1 : at - 1], response[at:]
    ended = sample.finish == "stop" and bool(answer) and answer[-1] == EOS and len(answer) - 1 <= len(value)
    right = sum(got == digit for got, digit in zip(answer[:-1], value, strict=False)) / len(value) if ended else 0.0
    called = float(told == value)
    return Reward(0.5 * called + 0.5 * right, {"called": called, "exact": float(called and right == 1.0)})


def build_model(folder: Path, seed: int, **arguments: Any) -> str:
    """Write the model before its first RL step into `folder`; a line that says how it came about."""
    from sloppy_model import build

    return build(folder, seed, **arguments)
