"""Prompts from any Python iterable, named by import path: `prompts.source = "towline.environment.iterable_prompts:iterable"`.

The buffer takes its rows once, at its start, since a cursor must name the same prompt again after a restart: so the iterable
has to give the same rows each time. A source that can't be held in memory implements `PromptSource` itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from towline.config import import_object
from towline.environment.prompts import PromptSource, from_rows
from towline.errors import UsageError


def iterable(
    tokenizer: Any,
    *,
    seed: int,
    factory: str,
    arguments: dict[str, Any] | None = None,
    limit: int | None = None,
    shuffle: bool = True,
    epochs: int | None = None,
    prompt_key: str = "prompt",
    chat_template: bool = False,
) -> PromptSource:
    """`factory` (module:name) is an iterable, or a callable that makes one of `arguments`; `limit` takes that many rows.

    A row is text, token IDs, or a mapping as one of `jsonl`'s lines.
    """
    target = import_object(factory, "prompts.arguments.factory")
    rows: Iterable[Any] = target(**(arguments or {})) if callable(target) else target
    taken = [_row(row, prompt_key, factory, number) for number, row in enumerate(islice(rows, limit))]
    if not taken:
        raise UsageError(f"prompts.arguments.factory = {factory!r} gave no row", code="prompts_empty")
    return from_rows(
        factory.rpartition(":")[2], taken, tokenizer, seed=seed, shuffle=shuffle, epochs=epochs, prompt_key=prompt_key,
        chat_template=chat_template,
    )  # fmt: skip


def _row(row: Any, prompt_key: str, factory: str, number: int) -> Mapping[str, Any]:
    if isinstance(row, str):
        return {prompt_key: row}
    if isinstance(row, list | tuple) and all(isinstance(token, int) for token in row):
        return {"tokens": list(row)}
    if isinstance(row, Mapping) and ("tokens" in row or prompt_key in row):
        return row
    raise UsageError(f"{factory}: row {number} is neither text, token IDs nor a mapping with {prompt_key!r}", code="prompts_file")
