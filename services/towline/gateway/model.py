"""The run's base model as requests need it: tokenizer, chat template and end-of-sequence tokens, without torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

from towline.errors import UsageError
from towline.session.spelling import Spelling, Tokenizer
from towline.store.base import base_files
from towline.store.log import Log
from towline.store.objects import ObjectStore
from towline.verifiers.model_tokenizer import prompt_tokenizer, stop_tokens
from towline.verifiers.tokenizer import LazyTokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")


class Model:
    """Blocking: call it off the event loop. `UsageError` where the model can't do what is asked."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.stop_token_ids = stop_tokens(files)
        self.tokenizer: LazyTokenizer | None = prompt_tokenizer(files) if any(name in files for name in TOKENIZER_FILES) else None

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._needed().encode(text)]

    def token(self, spelling: str) -> int | None:
        """The ID of a token of the vocabulary."""
        found: int | None = self._needed().token_to_id(spelling)
        return found

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        """A chat as the model's template writes it, up to where the assistant's answer begins. Texts stay texts, whatever special
        tokens they spell."""
        self._needed()
        try:
            text = self._spelling.render(messages, variables)
        except (UsageError, ValueError, TypeError, KeyError, LookupError) as error:
            raise self._refused(error) from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "jinja2":
                raise
            raise self._refused(error) from error
        return self._spelling.encode(text)

    def _refused(self, error: Exception) -> UsageError:
        said = self._spelling.unguarded(str(error))
        return UsageError(f"the chat template refuses the messages: {said}", code="chat_template")

    @functools.cached_property
    def _spelling(self) -> Spelling:
        return Spelling(cast(Tokenizer, self._needed()), frozenset(self.stop_token_ids))

    def _needed(self) -> LazyTokenizer:
        if self.tokenizer is None:
            raise UsageError(
                "the run's base model has no tokenizer: send token IDs (input_ids, or prompt as a list)", code="tokenizer"
            )
        return self.tokenizer


def load_model(objects: ObjectStore, log: Log) -> Model:
    """Of the run's entry 0; `MissingError` before there is one."""
    return Model(base_files(objects, log))
