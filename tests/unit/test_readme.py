"""README.md's example is code that runs: the settings load, the prompts come, the reward is given."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from towline.config import load_settings
from towline.contract.task import PromptRef
from towline.verifiers.base import Sample, load_verifier

README = Path(__file__).parents[2] / "README.md"


class Characters:
    def encode(self, text):
        return [ord(character) for character in text]

    def decode(self, tokens, *, skip_special_tokens=False):
        return "".join(map(chr, tokens))


def block(first: str, last: str) -> str:
    """README's indented lines from the one that begins with `first` to before the one that begins with `last`."""
    lines = README.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"    {first}"))
    end = next(i for i in range(begin, len(lines)) if lines[i].startswith(last))
    return textwrap.dedent("\n".join(lines[begin:end]))


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_task", raising=False)
    (tmp_path / "my_task.py").write_text(block("from towline.contract.task", "Every key"))
    (tmp_path / "run.toml").write_text(block("[run]", "where my_task.py"))
    yield load_settings(tmp_path / "run.toml")
    sys.modules.pop("my_task", None)


def test_the_prompts_are_what_the_settings_name(settings):
    import my_task

    train, held_out = my_task.prompts(Characters(), 0), my_task.held_out(Characters(), 0)
    prompts = [source.get(0, position) for source in (train, held_out) for position in range(len(source))]
    assert len({tuple(prompt.tokens) for prompt in prompts}) == 1200
    assert prompts[3].reference == {"answer": "21"}


def test_the_reward_is_what_the_settings_name(settings):
    verifier = load_verifier(settings.reward.function, settings.reward.arguments)

    def said(text):
        return Sample(
            prompt_tokens=np.array([1], np.int32), response_tokens=np.array([ord(c) for c in text], np.int32),
            policy_mask=np.ones(len(text), np.uint8), finish="stop", reference={"answer": "21"}, prompt_ref=PromptRef("t", 0, 0),
            tokenizer=Characters(), group=0, sample=0,
        )  # fmt: skip

    assert (verifier.call(said("It is 21.")), verifier.call(said("It is 20."))) == (1.0, 0.0)


def test_the_other_prompt_source_that_it_names_exists():
    from towline.config import import_object

    assert "towline.environment.prompts:jsonl" in README.read_text()
    assert callable(import_object("towline.environment.prompts:jsonl", "prompts.source"))
