"""Text of tokens as they come: no half characters, nothing that may turn out to be a stop string, and the cut where one is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Decodes a growing list of tokens, each piece beside the one before it, so that it costs the same at any length.

    `kept`: special tokens that are written also where the others are left out.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool, kept: Mapping[int, str] | None = None) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._kept = kept if kept and skip_special_tokens else {}
        self._from = self._read = 0

    def more(self, tokens: Sequence[int], *, last: bool) -> str:
        """The text that `tokens`, which begin with those of the earlier calls, add. What may be a part of a character waits,
        unless these are the `last`."""
        before = self._decode(tokens[self._from : self._read])
        whole = self._decode(tokens[self._from :])
        if not last and (whole.endswith(_REPLACEMENT) or len(whole) <= len(before)):
            return ""
        self._from, self._read = self._read, len(tokens)
        return whole[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        parts, begin = [], 0
        for at, token in enumerate(tokens):
            if (word := self._kept.get(token)) is not None:
                parts += [self._plain(tokens[begin:at]), word]
                begin = at + 1
        return "".join([*parts, self._plain(tokens[begin:])])

    def _plain(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=self._skip)) if tokens else ""


class StopStrings:
    """Lets text through up to the first of the strings."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops, self._keep = tuple(stops), keep
        self._held = ""
        self.matched: str | None = None

    def more(self, text: str, *, last: bool) -> str:
        """What of the text may go out. Once `matched` is set, nothing more does."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(self._held.index(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            at, self.matched = min(found)
            return self._held[: at + (len(self.matched) if self._keep else 0)]
        waits = 0 if last else max((overlap(self._held, stop) for stop in self._stops), default=0)
        out, self._held = self._held[: len(self._held) - waits], self._held[len(self._held) - waits :]
        return out


def overlap(text: str, mark: str) -> int:
    """Characters at the text's end that may begin the mark; fewer than all of it."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
