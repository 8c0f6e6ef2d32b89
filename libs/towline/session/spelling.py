"""A chat as tokens in which special tokens are the template's alone: a text that spells `<|im_end|>` stays a text.

Whoever writes a message, a tool's answer above all, could else end its turn and begin another one in anybody's name.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from towline.errors import UsageError


class Tokenizer(Protocol):
    """What is needed of one. Where it has no `backend_tokenizer` (of the tokenizers library), texts that spell special tokens
    are refused."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def token_to_id(self, token: str) -> int | None: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Any: ...


@dataclass(slots=True, eq=False)
class Spelling:
    """Of one tokenizer. `ends`: tokens that end a turn; they are kept from texts also where the vocabulary calls them plain."""

    tokenizer: Tokenizer
    ends: frozenset[int] = frozenset()
    _guard: str = field(default_factory=lambda: f"zq{secrets.token_hex(8)}zq", repr=False)
    """Put into a spelling while the template writes it; no template writes or trims it, and JSON leaves it as it is."""
    _marks: tuple[str, ...] | None = field(default=None, repr=False)

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, own: Sequence[Mapping[str, Any]] = (),
        apart: str = "",
    ) -> str:  # fmt: skip
        """The template's text, for `encode` alone: spellings in it are guarded. `own` messages, which come first, are ours and
        taken as they are; `apart` is another text that the rest mustn't spell."""
        marks = (*self.marks, apart) if apart else self.marks
        try:
            told = [*(dict(message) for message in own), *(self._guarded(dict(message), marks) for message in messages)]
            given = self._guarded(dict(variables), marks)
            return str(self.tokenizer.apply_chat_template(told, add_generation_prompt=True, tokenize=False, **given))
        except RecursionError:
            raise UsageError("messages: they are nested too deeply: send them flatter", code="messages") from None

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered text. `UsageError` where it has guarded spellings and the tokenizer can't tell them apart."""
        if self._guard not in text:
            return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=False)]
        return _plain(self.tokenizer, self.marks).encode(text, self._guard)

    @property
    def marks(self) -> tuple[str, ...]:
        """The spellings that no text may have, the longest first."""
        if self._marks is None:
            backend = getattr(self.tokenizer, "backend_tokenizer", None)
            found = set(getattr(self.tokenizer, "all_special_tokens", ()))
            if backend is not None:
                added = backend.get_added_tokens_decoder().items()
                found |= {token.content for number, token in added if token.special or number in self.ends}
            self._marks = tuple(sorted(filter(None, found), key=lambda mark: (-len(mark), mark)))
        return self._marks

    def unguarded(self, text: str) -> str:
        """For people: a message that quotes a rendered text."""
        return text.replace(self._guard, "")

    def _guarded(self, value: Any, marks: Iterable[str]) -> Any:
        if isinstance(value, str):
            for mark in marks:
                value = value.replace(mark, f"{mark[0]}{self._guard}{mark[1:]}")
            return value
        if isinstance(value, Mapping):
            return {self._guarded(key, marks): self._guarded(one, marks) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(one, marks) for one in value]
        return value


_made: WeakKeyDictionary[Any, dict[tuple[str, ...], _Plain]] = WeakKeyDictionary()
_making = threading.Lock()


def _plain(tokenizer: Any, marks: tuple[str, ...]) -> _Plain:
    """One for all that share the tokenizer: it is as large, and is made once such a text comes."""
    with _making:
        known = _made.setdefault(tokenizer, {})
        if marks not in known:
            backend = getattr(tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise UsageError(
                    "messages: a text spells a special token, which this model's tokenizer can't take as text: take it out",
                    code="special_token",
                )
            known[marks] = _Plain(backend, marks)
        return known[marks]


class _Plain:
    """The vocabulary once more, where no special token can be spelled: the template's own are written by aliases that nobody
    knows. One pass over the whole text, so what stands beside a special token is split as ever."""

    def __init__(self, backend: Any, marks: Sequence[str]) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._tokenizer = Tokenizer.from_str(backend.to_str())
        known = {token.content: (number, token) for number, token in backend.get_added_tokens_decoder().items()}
        secret = secrets.token_hex(8)
        self._aliases = {mark: f"zq{secret}x{index}zq" for index, mark in enumerate(marks) if mark in known}
        for mark, alias in self._aliases.items():
            _, token = known[mark]
            ways = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
            self._tokenizer.add_special_tokens([AddedToken(mark, normalized=token.normalized, special=True, **ways)])
            self._tokenizer.add_tokens([AddedToken(alias, normalized=False, special=False, **ways)])
        self._real = {self._tokenizer.token_to_id(alias): known[mark][0] for mark, alias in self._aliases.items()}
        self._tokenizer.encode_special_tokens = True

    def encode(self, text: str, guard: str) -> list[int]:
        for mark, alias in self._aliases.items():
            if mark in text:
                text = re.sub(f"{re.escape(mark)}(?!{guard})", alias, text)  # a guard behind it: a text's mark of one character
        found = self._tokenizer.encode(text.replace(guard, ""), add_special_tokens=False).ids
        return [self._real.get(token, token) for token in found]
