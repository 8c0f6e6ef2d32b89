"""examples/smollm2: the verifier is what it says, and no sum that is trained on is held out."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from towline.contract.task import PromptRef
from towline.verifiers.base import Sample

FOLDER = str(Path(__file__).parents[3] / "examples" / "smollm2")


class Characters:
    """A tokenizer of one token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in token_ids)


@pytest.fixture
def arithmetic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("arithmetic")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" 42\n", 1.0), ("42\n", 1.0), (" 42 (", 0.8), (" 42", 0.8), (" 41\n", 0.2), (" 421\n", 0.2),
        (" 4\n2", 0.0), ("is 42\n", 0.0), ("", 0.0), (" 42nd", 0.0), ("\n42\n", 0.0),
    ],
)  # fmt: skip
def test_the_reward_is_for_the_sum_in_front_and_for_nothing_else(arithmetic: Any, text: str, value: float) -> None:
    tokens = np.array([ord(character) for character in text], np.int32)
    sample = Sample(
        prompt_tokens=np.array([1], np.int32), response_tokens=tokens, policy_mask=np.ones(tokens.size, bool), finish="stop",
        reference={"answer": 42}, prompt_ref=PromptRef("sums", 0, 0), tokenizer=Characters(), group=1, sample=0,
    )  # fmt: skip
    assert arithmetic.reward(sample).value == pytest.approx(value)


def test_no_held_out_sum_is_trained_on_and_prompts_depend_on_the_seed_alone(arithmetic: Any) -> None:
    tokenizer = Characters()
    train, held_out = arithmetic.train_prompts(tokenizer, 3), arithmetic.eval_prompts(tokenizer, 3)

    def question(source: Any, position: int) -> str:
        return tokenizer.decode(source.get(0, position).tokens).rsplit("\n", 1)[1]

    asked = {question(train, position) for position in range(len(train))}
    kept = {question(held_out, position) for position in range(len(held_out))}
    assert (len(asked), len(kept)) == (len(train), 64)
    assert not asked & kept
    again = arithmetic.train_prompts(tokenizer, 3)
    assert [again.get(2, position) for position in (0, 9)] == [train.get(2, position) for position in (0, 9)]


def test_the_examples_in_a_prompt_are_right(arithmetic: Any) -> None:
    lines = arithmetic.text((7, 35), 0).splitlines()
    assert lines[-1] == "7 + 35 ="
    assert len(lines) == 3
    for line in lines[:-1]:
        sum_, answer = line.split(" = ")
        assert eval(sum_) == int(answer)
