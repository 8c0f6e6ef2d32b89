"""Text from token IDs, without torch: a model folder's tokenizer, read when it is first needed.

A tokenizer.json is enough, and `tokenizers` reads it; `transformers` reads every other kind.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from towline.errors import UsageError
from towline.store.base import base_files
from towline.store.log import Log
from towline.store.objects import ObjectStore


class Tokenizer(Protocol):
    """What a verifier may ask of a tokenizer; Hugging Face's have it."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


class LazyTokenizer:
    """Loads the tokenizer at the first use, once, from any thread: most runs that score token IDs never need it."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._loaded: Any = None

    @property
    def loaded(self) -> Any:
        if self._loaded is None:
            with self._lock:
                if self._loaded is None:
                    self._loaded = self._load()
        return self._loaded

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self.loaded.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loaded, name)


def one_line(error: Exception) -> str:
    """What an error says first."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer; `UsageError` where it has none or nothing that reads it is installed.

    A tokenizer.json is read by `tokenizers` alone: importing transformers costs seconds and, where it is installed, torch.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        with contextlib.suppress(ImportError):
            from tokenizers import Tokenizer as Plain

            try:
                return Plain.from_file(str(path))
            except Exception as error:  # `tokenizers` raises no narrower kind
                raise UsageError(f"{path} can't be read: {one_line(error)}; give the model's own", code="tokenizer") from error
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UsageError("a tokenizer is needed: pip install tokenizers, or 'towline[torch]'", code="tokenizer") from None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: no tokenizer can be read there: {one_line(error)}", code="tokenizer") from error


def stored_tokenizer(objects: ObjectStore, run: str) -> LazyTokenizer:
    """The tokenizer that was seeded with the run's base model: it needs the store alone, wherever a service runs."""

    def load() -> Any:
        log = Log(objects, run)
        log.refresh()
        with tempfile.TemporaryDirectory(prefix="towline-tokenizer-") as name:
            folder = Path(name)
            for file, data in base_files(objects, log).items():
                (folder / file).write_bytes(data)
            return load_tokenizer(folder)

    return LazyTokenizer(load)
