"""The demo's task: what is trained is never held out, and the reward is what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from towline.contract.task import PromptRef
from towline.errors import UsageError
from towline.verifiers.base import Sample

EXAMPLES = str(Path(__file__).parents[3] / "examples")


@pytest.fixture
def task(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from sort_digits import task

    return task


def answered(task, text, *, finish="stop", want="12589", end=True):
    tokens = np.array(task.encode(text) + [task.EOS] * end, np.int32)
    return Sample(
        prompt_tokens=np.array([task.BOS], np.int32),
        response_tokens=tokens,
        policy_mask=np.ones(tokens.size, np.uint8),
        finish=finish,
        reference={"answer": want},
        prompt_ref=PromptRef("t", 0, 0),
        tokenizer=None,
        group=0,
        sample=0,
    )


@pytest.mark.parametrize(
    ("text", "value", "exact"),
    [("12589", 1.0, 1.0), ("52918", 0.2, 0.0), ("12598", 0.6, 0.0), ("125", 0.6, 0.0), ("", 0.0, 0.0), ("125899", 0.0, 0.0)],
)
def test_the_reward_is_the_share_of_right_positions(task, text, value, exact):
    reward = task.reward(answered(task, text))
    assert (reward.value, reward.components) == (pytest.approx(value), {"exact": exact})


def test_an_answer_that_never_ended_gets_nothing(task):
    assert task.reward(answered(task, "125891", finish="length", end=False)).value == 0.0


def test_no_training_prompt_is_ever_held_out(task):
    evaluation = task.eval_prompts(None, 0, 1000)
    held_out = {tuple(evaluation.get(0, position).tokens) for position in range(1000)}
    assert len(held_out) == 1000
    for seed in range(3):
        source = task.train_prompts(None, seed, 3000)
        trained = {tuple(source.get(epoch, position).tokens) for epoch in range(2) for position in range(3000)}
        assert not trained & held_out
        assert len(trained) > 5000


def test_prompts_are_the_same_in_another_process(task):
    code = "from sort_digits.task import *; print([train_prompts(None, 7).get(e, p).tokens for e in (0, 3) for p in range(5)])"
    done = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, check=True, timeout=60)
    source = task.train_prompts(None, 7)
    assert done.stdout.strip() == str([source.get(epoch, position).tokens for epoch in (0, 3) for position in range(5)])


def test_the_reference_is_the_prompts_sorted_digits(task):
    prompt = task.train_prompts(None, 0).get(0, 0)
    digits = prompt.tokens[1:-1]
    assert task.encode(prompt.reference["answer"]) == sorted(digits)
    assert len(digits) == task.DIGITS


def test_more_held_out_prompts_than_there_are_is_one_line(task):
    with pytest.raises(UsageError, match="there are"):
        task.eval_prompts(None, 0, 100_000)


def test_drawing_prompts_and_scoring_needs_no_torch(task):
    code = "import sys, sort_digits; sort_digits.train_prompts(None, 0).get(0, 0); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
