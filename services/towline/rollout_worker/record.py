"""What a sample has: tokens, who chose each, the policy's logprobs and versions. Grows turn by turn; pure bookkeeping.

Its lists are replaced, never changed, so that whoever was given one may keep it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from towline.contract.partial import Partial, Turn
from towline.contract.task import VersionSpan
from towline.contract.trajectory import Segment, policy_mask
from towline.engine.base import Generation, Progress

Kind = Literal["prompt", "policy", "environment", "tool"]


@dataclass(slots=True)
class Record:
    """`turn` is `towline.contract.partial.Partial`'s."""

    tokens: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the policy's tokens, in order."""
    turn: Turn | None = None
    queue_seconds: float = 0.0
    generate_seconds: float = 0.0
    sampled_here: frozenset[int] = frozenset()
    """Versions of the tokens that didn't come with a PARTIAL."""

    @classmethod
    def of(cls, partial: Partial) -> Record:
        mask = policy_mask(partial.segments, partial.tokens.size).astype(bool)
        return cls(
            tokens=partial.tokens.tolist(), segments=list(partial.segments), spans=list(partial.version_spans),
            logprobs=partial.logprobs[mask].tolist(), turn=partial.turn, queue_seconds=partial.queue_seconds,
            generate_seconds=partial.generate_seconds,
        )  # fmt: skip

    @property
    def policy_tokens(self) -> int:
        return len(self.logprobs)

    @property
    def turn_tokens(self) -> list[int]:
        """The policy's latest turn, whole."""
        last = self.segments[-1]
        return self.tokens[last.start : last.end]

    @property
    def mask(self) -> npt.NDArray[np.uint8]:
        """uint8[T]: 1 where the policy chose the token."""
        return policy_mask(tuple(self.segments), len(self.tokens))

    @property
    def all_logprobs(self) -> npt.NDArray[np.float32]:
        """float32[T], NaN where the policy didn't choose the token."""
        logprobs = np.full(len(self.tokens), np.nan, np.float32)
        logprobs[self.mask.astype(bool)] = self.logprobs
        return logprobs

    def answer(self, tokens: list[int], kind: Kind) -> None:
        """The environment's tokens, maybe none: the policy's turn comes next."""
        self.turn = None
        if tokens:
            at = len(self.tokens)
            self.tokens = self.tokens + tokens
            self.segments = [*self.segments, Segment(at, at + len(tokens), kind)]

    def take(self, generated: Progress | Generation, turn: Turn) -> None:
        """The policy's tokens: its turn begins with them, or goes on where one is open."""
        if not generated.tokens:
            return
        at = len(self.tokens)
        self.spans = _joined(self.spans, generated.spans, at, goes_on=self.turn == "open")
        earlier, begins = (self.segments[:-1], self.segments[-1].start) if self.turn == "open" else (self.segments, at)
        self.tokens = self.tokens + generated.tokens
        self.segments = [*earlier, Segment(begins, len(self.tokens), "policy")]
        self.logprobs = self.logprobs + generated.logprobs
        self.queue_seconds += generated.queue_seconds
        self.generate_seconds += generated.generate_seconds
        self.sampled_here |= {span.version for span in generated.spans}
        self.turn = turn

    def with_turn(self, progress: Progress) -> Record:
        """A record of its own that has the running turn so far too."""
        record = replace(self)
        record.take(progress, "open")
        return record


def _joined(spans: list[VersionSpan], more: list[VersionSpan], at: int, *, goes_on: bool) -> list[VersionSpan]:
    """`more`, which begins at token `at`, after `spans`."""
    joined = list(spans)
    for span in more:
        start, end, cut = at + span.start, at + span.end, span.cut
        last = joined[-1] if joined else None
        if last is not None and cut == "start":
            if last.version == span.version and goes_on:
                joined[-1] = VersionSpan(last.start, end, last.version, last.cut)
                continue
            if last.version != span.version:
                # Whoever goes on computes the KV cache anew, under the version that it begins with.
                cut = "retract"
        joined.append(VersionSpan(start, end, span.version, cut))
    return joined
