"""A base model's tokenizer for prompt sources and the gateway, without torch: tokenizer.json and the chat template beside it.

It has what they need of a Hugging Face tokenizer. `transformers` isn't imported for it, since that imports torch.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from towline.errors import UsageError
from towline.verifiers.tokenizer import LazyTokenizer, load_tokenizer, one_line

if TYPE_CHECKING:
    from jinja2 import Template


class PlainTokenizer:
    """Text to token IDs and back. Raises `UsageError` where the model's files can't do what is asked."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise UsageError("the prompt source needs a tokenizer: pip install tokenizers", code="tokenizer") from None
        try:
            self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception as error:  # `tokenizers` raises no narrower kind
            raise UsageError(
                f"the base model's tokenizer.json can't be read: {one_line(error)}; give the model's own", code="tokenizer"
            ) from error
        self._template = _chat_template(files)
        self._special = _special_tokens(files)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's token IDs."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of the token IDs."""
        return str(self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=skip_special_tokens))

    def token_to_id(self, token: str) -> int | None:
        """The ID of a token by its spelling in the vocabulary."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    @functools.cached_property
    def _compiled(self) -> Template:
        if self._template is None:
            raise UsageError("the base model has no chat template: give prompts as text or token IDs", code="chat_template")
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        return environment.from_string(self._template)

    @property
    def backend_tokenizer(self) -> Any:
        """The tokenizers library's."""
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """The messages as the model's chat template writes them: token IDs, or with tokenize=False the text."""
        text = self._compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **self._special, **variables)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def prompt_tokenizer(files: Mapping[str, bytes]) -> LazyTokenizer:
    """The tokenizer in a base model's files (name -> bytes), read when it's first used: many sources give token IDs."""

    def load() -> Any:
        if "tokenizer.json" in files:
            return PlainTokenizer(files)
        with tempfile.TemporaryDirectory(prefix="towline-tokenizer-") as name:  # an older format: only transformers reads it
            for file, data in files.items():
                (Path(name) / file).write_bytes(data)
            return load_tokenizer(Path(name))

    return LazyTokenizer(load)


def stop_tokens(files: Mapping[str, bytes]) -> tuple[int, ...]:
    """The end-of-sequence tokens that generation_config.json and config.json name; empty where neither does."""
    found: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        value = _json(files, name).get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int):
                found[token] = None
    return tuple(found)


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        tree = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise UsageError(f"the base model's {name} isn't JSON: {error}", code="model_files") from error
    return tree if isinstance(tree, dict) else {}


def _chat_template(files: Mapping[str, bytes]) -> str | None:
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    template = _json(files, "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    found = {}
    for name, value in _json(files, "tokenizer_config.json").items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _refuse(message: str) -> None:
    raise UsageError(f"the chat template refuses the messages: {message}", code="chat_template")
