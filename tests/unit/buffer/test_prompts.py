"""Prompt sources: deterministic, resumable by a cursor, refused with a reason; and the tokenizer they are given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.contract.task import Cursor, PromptRef
from towline.environment.prompts import Shuffled, draw, exhausted, jsonl
from towline.errors import UsageError
from towline.verifiers.model_tokenizer import PlainTokenizer, prompt_tokenizer, stop_tokens


def numbers(length: int, *, seed: int = 1, epochs: int | None = None) -> Shuffled:
    return Shuffled("numbers", length, lambda index: ([index], {"row": index}), seed=seed, epochs=epochs)


@given(length=st.integers(1, 20), seed=st.integers(0, 5), drawn=st.integers(1, 60), cut=st.integers(0, 59))
def test_a_cursor_is_all_that_a_restart_needs(length: int, seed: int, drawn: int, cut: int) -> None:
    def take(cursor: Cursor, count: int) -> tuple[list[tuple[int, int]], Cursor]:
        source, found = numbers(length, seed=seed), []
        for _ in range(count):
            prompt, cursor = draw(source, cursor)
            found.append((prompt.ref.epoch, prompt.ref.index))
        return found, cursor

    cut = min(cut, drawn)
    whole, _ = take(Cursor(0, 0), drawn)
    first, cursor = take(Cursor(0, 0), cut)
    rest, _ = take(cursor, drawn - cut)
    assert first + rest == whole
    for epoch in range(drawn // length):
        assert sorted(index for of, index in whole if of == epoch) == list(range(length))


def test_passes_differ_and_seeds_differ() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        source = numbers(50, seed=seed)
        return [source.get(epoch, position).ref.index for position in range(50)]

    assert len({tuple(order(seed, epoch)) for seed in range(2) for epoch in range(3)}) == 6
    assert order(1, 2) == order(1, 2)


def test_a_number_of_passes_ends_the_source() -> None:
    source = numbers(3, epochs=2)
    assert not exhausted(source, Cursor(1, 2))
    assert exhausted(source, Cursor(2, 0))
    assert not exhausted(numbers(3), Cursor(99, 0))


def test_a_source_that_shrank_goes_on_with_the_next_pass() -> None:
    prompt, cursor = draw(numbers(3), Cursor(4, 7))
    assert prompt.ref.epoch == 5
    assert cursor == Cursor(5, 1)


class Words:
    """A tokenizer of one token a word."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]

    def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt
        assert not tokenize
        return " ".join(message["content"] for message in messages) + " go"


def test_json_lines_give_text_messages_or_tokens_and_the_rest_is_the_reference(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": "a bb ccc", "answer": 6},
        {"tokens": [7, 8], "answer": 1},
        {"prompt": [{"role": "user", "content": "one three"}], "answer": 2},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    source = jsonl(Words(), seed=1, path=str(path), shuffle=False)
    assert [source.get(0, i).tokens for i in range(len(source))] == [[1, 2, 3], [7, 8], [3, 5, 2]]
    assert [source.get(0, i).reference for i in range(3)] == [{"answer": 6}, {"answer": 1}, {"answer": 2}]
    assert source.get(2, 1).ref == PromptRef("set", 2, 1)
    assert len(jsonl(Words(), seed=1, path=str(path), start=1, stop=2)) == 1
    assert jsonl(Words(), seed=1, path=str(path), shuffle=False, chat_template=True).get(0, 0).tokens == [1, 2, 3, 2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "line 1 isn't JSON"), ('{"question": "x"}', "line 1 has neither 'prompt' nor 'tokens'"), ("", "no prompt in lines")],
)
def test_a_file_that_is_no_source_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=reason):
        jsonl(Words(), seed=1, path=str(path))
    with pytest.raises(UsageError, match="can't be read"):
        jsonl(Words(), seed=1, path=str(tmp_path / "none.jsonl"))


@pytest.fixture
def model_files() -> dict[str, bytes]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2, "user": 3, ":": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    template = (
        "{% for m in messages %}{{ m.role }} : {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}{{ eos_token }}{% endif %}"
    )
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"chat_template": template, "eos_token": {"content": "world"}}).encode(),
        "config.json": b'{"eos_token_id": 2}',
        "generation_config.json": b'{"eos_token_id": [4, 2]}',
    }


def test_the_plain_tokenizer_encodes_decodes_and_renders_chats(model_files: dict[str, bytes]) -> None:
    tokenizer = PlainTokenizer(model_files)
    assert tokenizer.encode("hello world") == [1, 2]
    assert tokenizer.decode([1, 2]) == "hello world"
    assert tokenizer.token_to_id("world") == 2
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "user : hello\nworld"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True) == [3, 4, 1, 2]
    del model_files["tokenizer_config.json"]
    with pytest.raises(UsageError, match="no chat template"):
        PlainTokenizer(model_files).apply_chat_template(messages)


def test_the_models_own_end_tokens_stop_generation(model_files: dict[str, bytes]) -> None:
    assert stop_tokens(model_files) == (4, 2)
    assert stop_tokens({"config.json": b'{"eos_token_id": 7}'}) == (7,)
    assert stop_tokens({}) == ()


def test_the_tokenizer_is_read_when_it_is_first_used() -> None:
    tokenizer = prompt_tokenizer({"tokenizer.json": b"rot"})
    with pytest.raises(Exception, match="expected"):
        tokenizer.encode("x")


def test_the_buffer_starts_and_tokenizes_without_torch(model_files: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(model_files["tokenizer.json"])
    code = (
        "import sys, pathlib, towline.buffer.service\n"
        "from towline.verifiers.model_tokenizer import prompt_tokenizer\n"
        f"data = pathlib.Path({str(tmp_path)!r}, 'tokenizer.json').read_bytes()\n"
        "assert prompt_tokenizer({'tokenizer.json': data}).encode('hello world') == [1, 2]\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
