"""Where prompts come from. A source is deterministic in (seed, epoch, position), so that a cursor is all a restart needs.

A run names its source by import path: `prompts.source = "module:function"`, called as function(tokenizer, seed=…, **arguments).
The buffer alone reads it, one prompt at a time, and writes the cursor into each task.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from towline.contract.task import Cursor, PromptRef
from towline.errors import UsageError


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token IDs, where they came from, and what the verifier needs but the policy mustn't see (MessagePack-able values)."""

    tokens: list[int]
    ref: PromptRef
    reference: dict[str, Any] = field(default_factory=dict)


class PromptSource(Protocol):
    """A finite set of prompts that may be passed over many times.

    A source with an attribute `epochs` (an int) ends after that many passes; without one, or with None, it never ends.
    """

    def __len__(self) -> int:
        """Prompts in one pass; at least 1."""
        ...

    def get(self, epoch: int, position: int) -> Prompt:
        """The prompt at `position` (0 <= position < len) of pass `epoch`; always the same one for the same seed."""
        ...


PromptFactory = Callable[..., PromptSource]
"""function(tokenizer, seed: int, **arguments) -> PromptSource"""


def advance(source: PromptSource, cursor: Cursor) -> Cursor:
    """The cursor after the prompt at `cursor`."""
    if cursor.position + 1 >= len(source):
        return Cursor(cursor.epoch + 1, 0)
    return Cursor(cursor.epoch, cursor.position + 1)


def exhausted(source: PromptSource, cursor: Cursor) -> bool:
    """Whether no prompt is left at `cursor`: the source names a number of epochs, and they have passed."""
    epochs: int | None = getattr(source, "epochs", None)
    return epochs is not None and cursor.epoch >= epochs


def draw(source: PromptSource, cursor: Cursor) -> tuple[Prompt, Cursor]:
    """The prompt at `cursor` and the cursor after it.

    A source that has shrunk since the cursor was written goes on with its next pass. `UsageError` names the prompt that a
    source fails to give.
    """
    if cursor.position >= len(source):
        cursor = Cursor(cursor.epoch + 1, 0)
    try:
        prompt = source.get(cursor.epoch, cursor.position)
    except Exception as error:
        raise UsageError(
            f"prompts.source gave no prompt {cursor.position} of pass {cursor.epoch}: {type(error).__name__}: {error}",
            code="prompt_source",
        ) from error
    if not isinstance(prompt, Prompt):
        raise UsageError(
            f"prompts.source gave a {type(prompt).__name__} as prompt {cursor.position} of pass {cursor.epoch}: "
            "its get must return a towline.environment.prompts.Prompt",
            code="prompt_source",
        )
    if not prompt.tokens:
        raise UsageError(
            f"prompts.source gave an empty prompt {cursor.position} of pass {cursor.epoch}: leave it out", code="prompt_empty"
        )
    return prompt, advance(source, cursor)


def shuffled(length: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(length) that (seed, epoch) alone decides."""
    order = list(range(length))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


class Shuffled:
    """Rows in a new order each pass (or as they are, with shuffle=False): `make(row index)` gives tokens and reference.

    The helper to build a source of one's own on: it keeps one pass's order and nothing else.
    """

    def __init__(
        self,
        name: str,
        length: int,
        make: Callable[[int], tuple[Sequence[int], dict[str, Any]]],
        *,
        seed: int,
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        if length < 1:
            raise UsageError(f"prompt source {name!r} is empty: give it at least one prompt", code="prompts_empty")
        self.name, self.epochs = name, epochs
        self._length, self._make, self._seed, self._shuffle = length, make, seed, shuffle
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return self._length

    def get(self, epoch: int, position: int) -> Prompt:
        index = self._index(epoch, position)
        tokens, reference = self._make(index)
        return Prompt(list(tokens), PromptRef(self.name, epoch, index), reference)

    def _index(self, epoch: int, position: int) -> int:
        if not self._shuffle:
            return position
        if self._order[0] != epoch:
            self._order = (epoch, shuffled(self._length, self._seed, epoch))
        return self._order[1][position]


def jsonl(
    tokenizer: Any,
    *,
    seed: int,
    path: str,
    shuffle: bool = True,
    epochs: int | None = None,
    prompt_key: str = "prompt",
    start: int = 0,
    stop: int | None = None,
    chat_template: bool = False,
) -> PromptSource:
    """A file of one JSON object a line; lines [start, stop) of it.

    `prompt_key` holds the text, chat messages (a list; the tokenizer's chat template is applied, also to plain text with
    chat_template = true) or, under `tokens`, token IDs. Everything else in the object is the verifier's reference.
    """
    rows = _read_rows(Path(path), prompt_key)[start:stop]
    if not rows:
        raise UsageError(f"{path}: no prompt in lines {start} to {stop}: correct start and stop", code="prompts_empty")

    return from_rows(
        Path(path).stem, rows, tokenizer, seed=seed, shuffle=shuffle, epochs=epochs, prompt_key=prompt_key,
        chat_template=chat_template,
    )  # fmt: skip


def from_rows(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    seed: int,
    shuffle: bool = True,
    epochs: int | None = None,
    prompt_key: str = "prompt",
    chat_template: bool = False,
) -> PromptSource:
    """Rows as `jsonl` has them, from wherever: `rows[i]` is read when prompt i is drawn."""

    def make(index: int) -> tuple[Sequence[int], dict[str, Any]]:
        row = dict(rows[index])
        if "tokens" in row:
            return [int(token) for token in row.pop("tokens")], row
        return _tokens(tokenizer, row.pop(prompt_key), chat_template), row

    return Shuffled(name, len(rows), make, seed=seed, shuffle=shuffle, epochs=epochs)


def _read_rows(path: Path, prompt_key: str) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"prompts: {path} can't be read: {error}", code="prompts_file") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"prompts: {path}, line {number} isn't JSON: {error}", code="prompts_file") from error
        if not isinstance(row, dict) or ("tokens" not in row and prompt_key not in row):
            raise UsageError(f"prompts: {path}, line {number} has neither {prompt_key!r} nor 'tokens'", code="prompts_file")
        rows.append(row)
    return rows


def _tokens(tokenizer: Any, prompt: Any, chat_template: bool) -> list[int]:
    """Text or chat messages as token IDs, for Hugging Face's tokenizers and for a bare `tokenizers.Tokenizer`."""
    if isinstance(prompt, str) and chat_template:
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, str):
        apply = getattr(tokenizer, "apply_chat_template", None)
        if apply is None:
            raise UsageError("chat messages need a tokenizer with a template: pip install 'towline[torch]'", code="chat_template")
        rendered = apply(prompt, add_generation_prompt=True, tokenize=False)
        return _ids(tokenizer.encode(rendered, add_special_tokens=False))
    return _ids(tokenizer.encode(prompt))


def _ids(encoded: Any) -> list[int]:
    return [int(token) for token in getattr(encoded, "ids", encoded)]
