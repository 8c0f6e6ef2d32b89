"""Environments of the `verifiers` package, by their own rollout and rubric, one turn at a time and on token IDs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from towline.contract.task import Cursor, PromptRef, SamplingParams, Task, pack_tokens
from towline.errors import VerifierError

pytest.importorskip("verifiers")
pytest.importorskip("verifiers.envs.multiturn_env", reason="needs the 0.1 line of verifiers")

MODULE = """
import verifiers as vf
from datasets import Dataset

class Guessing(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        guess = int(messages[-1].content)
        secret = int(state["answer"])
        if guess == secret:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return []
        return [{"role": "user", "content": "higher {}" if guess < secret else "lower {}"}]

def found(completion, answer, **kwargs):
    said = [message for message in completion if message.role == "assistant"]
    return 1.0 / len(said) if said[-1].content == answer else 0.0

def load_environment(turns=4):
    rows = [{"question": "guess", "answer": str(number)} for number in (5, 8)]
    return Guessing(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[found]), max_turns=turns, system_prompt="be quick")
"""


class Characters:
    """A tokenizer of characters; <|im_end|> is token 0."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0 if piece == "\x00" else ord(piece) for piece in text.replace("<|im_end|>", "\x00")]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join("" if token == 0 else chr(token) for token in token_ids)


ARGUMENTS: dict[str, Any] = {"environment": "towline-guessing-test", "arguments": {"turns": 3}}


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "towline_guessing_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


async def play(guesses: list[str], row: int = 0) -> tuple[list[int], list[int], str]:
    """The sample's response tokens and mask as the worker would make them, and how it ended."""
    from towline.environment.verifiers_rollout import VerifiersEnvironment, train_prompts

    tokenizer = Characters()
    prompt = train_prompts(tokenizer, 0, **ARGUMENTS).get(0, row)
    environment = VerifiersEnvironment(tokenizer, **ARGUMENTS)
    assert await environment.reset(task(prompt.tokens, prompt.reference)) == prompt.tokens
    response: list[int] = []
    mask: list[int] = []
    end = "open"
    for guess in guesses:
        turn = [*map(ord, guess), 0]
        response, mask = response + turn, mask + [1] * len(turn)
        step = await environment.step(turn, "stop")
        if step.done:
            end = "tool_limit" if step.limit_reached else "stop"
            break
        response, mask = response + step.tokens, mask + [0] * len(step.tokens)
    await environment.close()
    return response, mask, end


def task(tokens: list[int], reference: dict[str, Any]) -> Task:
    return Task(
        run="r", lane="train", group=1, sample=0, group_size=1, prompt=pack_tokens(tokens), prompt_ref=PromptRef("s", 0, 0),
        cursor=Cursor(0, 1), reference=reference, sampling=SamplingParams(max_tokens=50), seed=1, not_before_depth=0,
        admitted_at=0.0, deadline=1e12,
    )  # fmt: skip


async def reward(response: list[int], mask: list[int], finish: Any, row: int = 0) -> Any:
    from towline.verifiers.base import Sample
    from towline.verifiers.verifiers_rollout import VerifiersReward

    return await VerifiersReward(**ARGUMENTS)(
        Sample(
            prompt_tokens=np.zeros(1, np.int32), response_tokens=np.array(response, np.int32),
            policy_mask=np.array(mask, np.uint8), finish=finish, reference={"split": "train", "row": row},
            prompt_ref=PromptRef("s", 0, row), tokenizer=Characters(),
            group=1, sample=0,
        )
    )  # fmt: skip


def test_prompts_are_the_dataset_s_messages_by_the_template() -> None:
    from towline.environment.verifiers_rollout import train_prompts

    prompts = train_prompts(Characters(), 0, **ARGUMENTS)
    assert len(prompts) == 2
    text = "".join("<|im_end|>" if token == 0 else chr(token) for token in prompts.get(0, 1).tokens)
    assert text == ("<|im_start|>system\nbe quick<|im_end|>\n<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\n")
    msgspec.msgpack.encode(prompts.get(0, 1).reference)


async def test_turns_are_answered_by_the_package_and_only_the_answers_are_encoded() -> None:
    response, mask, end = await play(["3", "9", "5"])
    said = "".join("<|im_end|>" if token == 0 else chr(token) for token, mine in zip(response, mask, strict=True) if not mine)
    turn = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert said == turn.replace("{}", "higher {}") + turn.replace("{}", "lower {}")
    assert end in ("stop", "tool_limit")
    score = await reward(response, mask, end)
    assert score.value == pytest.approx(1 / 3)
    assert score.components["found"] == pytest.approx(1 / 3)


async def test_a_right_guess_ends_it_and_turns_that_are_used_up_are_a_limit() -> None:
    response, mask, end = await play(["8"], row=1)
    assert end == "stop"
    assert (await reward(response, mask, end, row=1)).value == 1.0
    response, mask, end = await play(["1", "2", "3", "4"])
    assert (end, sum(mask)) == ("tool_limit", 6)
    assert (await reward(response, mask, end)).value == 0.0


async def test_a_sample_that_was_cut_off_is_unfinished_and_one_that_went_on_too_long_is_an_error() -> None:
    response, mask, _ = await play(["1"])
    assert (await reward(response, mask, "deadline")).components == {"unfinished": 1.0}
    with pytest.raises(VerifierError, match="ended earlier"):
        await reward([ord("5"), 0, 7, ord("5"), 0], [1, 1, 0, 1, 1], "stop")


async def test_a_conversation_that_is_given_up_leaves_no_task_behind() -> None:
    await play(["1"])
    assert len(asyncio.all_tasks()) == 1
