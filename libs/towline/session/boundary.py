"""What comes between a sampled turn and the next one, as tokens: the one place where a chat template meets a stored prefix.

The prefix is never written anew. The template renders a short stand-in conversation with the new messages at its end, and what
follows the stand-in's answer is tokenised alone. That is safe where the answer's closing begins with a special token: every
tokenizer splits there first, so no merge reaches across. `prove` checks it on the tokenizer itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from towline.errors import UsageError
from towline.session.messages import Message
from towline.session.spelling import Spelling, Tokenizer

STAND_IN = "zqtowlinezq"
"""The stand-in's answer: a text that no template writes or trims."""
_ASKED = {"role": "user", "content": "q"}
_ANSWERED = {"role": "assistant", "content": STAND_IN}


@dataclass(slots=True)
class Boundary:
    """Of one tokenizer. `ends`: tokens with which the policy ends its turn; `family` says which rules chose them."""

    tokenizer: Tokenizer
    ends: frozenset[int]
    family: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    """For the template, the same in every turn (enable_thinking, …)."""
    _spelling: Spelling = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._spelling = Spelling(self.tokenizer, self.ends)

    def opening(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[int]:
        """The first prompt, up to where the policy's answer begins."""
        return self._encode(self._render(messages, tools))

    def next(self, sampled: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """What stands between the `sampled` turn and the policy's next one, when `messages` follow it.

        A turn that was cut off (length) is closed here; one that ended by itself has its end token already. Tools aren't
        told again: they stand in the prefix.
        """
        tokens = self._closing(self._after_text(messages))
        ended = bool(sampled) and sampled[-1] in self.ends
        return tokens[1:] if ended else tokens

    def prove(self) -> None:
        """`UsageError` unless the template's text may be cut where an answer ends: the tokens before and those after are then
        those of the whole. Tried with texts that end and begin as merges like it."""
        for answer, follow in _TRIALS:
            second = {"role": "user", "content": follow}
            whole = self._render([_ASKED, {"role": "assistant", "content": answer}, second], None)
            after = self._after_text([second])
            closing = self._closing(after)
            head = whole.removesuffix(after)
            if head == whole or not head.endswith(answer):
                raise self._unsafe(f"what follows an answer depends on the answer ({answer!r})")
            if self._encode(head) + closing != self._encode(whole):
                raise self._unsafe(f"after {answer!r} the parts' tokens aren't those of the whole")

    def _closing(self, after: str) -> list[int]:
        tokens = self._encode(after)
        if not tokens or tokens[0] not in self.ends:
            what = f"token {tokens[0]}, {self.tokenizer.decode(tokens[:1])!r}," if tokens else "nothing"
            raise self._unsafe(f"an answer is closed by {what} which isn't known to end a turn")
        return tokens

    def _after_text(self, messages: Sequence[Message]) -> str:
        text = self._render(messages, None, own=(_ASKED, _ANSWERED))
        before, found, after = text.rpartition(STAND_IN)
        if not found or STAND_IN in before:
            raise self._unsafe("it doesn't write an answer as it is, once")
        return after

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, own: Sequence[Message] = ()) -> str:
        """`own` messages come first, and only they may spell the stand-in."""
        variables = dict(self.variables)
        if tools:
            variables["tools"] = list(tools)
        try:
            return self._spelling.render(messages, variables, own=own, apart=STAND_IN)
        except UsageError as error:
            raise UsageError(self._spelling.unguarded(error.message), code=error.code) from error
        except Exception as error:
            said = self._spelling.unguarded(_line(error))
            raise UsageError(f"the chat template refuses the messages: {said}", code="chat_template") from error

    def _encode(self, text: str) -> list[int]:
        return self._spelling.encode(text)

    def _unsafe(self, why: str) -> UsageError:
        return UsageError(
            f"sessions can't be kept with this model's chat template ({self.family}): {why}; send token IDs to /generate instead",
            code="chat_boundary",
        )


_TRIALS = (
    ("plain words", "and more"),
    ("ends in a space then letters 1", "  two spaces"),
    ("12", "345"),
    ("größe, naïve, 東京", "ßtart"),
    ("line\nline", "\nnew line"),
    ("a.", ".b"),
)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
