"""What the decider looks at, and the words its parts share."""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from towline.buffer.limiter import Limiter, pacing
from towline.buffer.presence import Presence
from towline.buffer.rules import Rules
from towline.buffer.state import State
from towline.contract.control import VERIFY_FAILED_ALL, Record
from towline.environment.prompts import PromptSource, exhausted
from towline.store.lineage import Lineage

Unit = tuple[Record, ...]
"""Records to be appended together: one, or an atomic batch. Their `writer` is empty until the service signs them."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The prompts. They're deterministic in (seed, pass, position), so reading them is no side effect."""

    train: PromptSource
    evaluation: PromptSource


@dataclass(frozen=True, slots=True)
class View:
    """State, lineage (entry 0 is there), rules, prompts, the time in Unix seconds, and who is where."""

    state: State
    lineage: Lineage
    rules: Rules
    sources: Sources
    now: float
    presence: Presence = field(default_factory=Presence)

    @property
    def depth(self) -> int:
        """The LOG's: batches consumed along the lineage."""
        return self.lineage.depth(self.lineage.latest)

    @property
    def pacing(self) -> Limiter:
        """The limiter of what is admitted and not yet consumed, in groups."""
        rules = self.rules
        return pacing(
            groups_per_batch=rules.admitted_per_batch, max_staleness=rules.max_staleness, batches_left=rules.steps - self.depth
        )

    @property
    def most_waiting(self) -> int:
        """How many whole external groups may wait for room beyond what there is."""
        return (1 + self.rules.max_staleness) * self.rules.admitted_per_batch

    @property
    def out_of_data(self) -> bool:
        return exhausted(self.sources.train, self.state.cursor) and not self.state.requeue

    @property
    def resampled_out(self) -> bool:
        """Whether so many groups were filtered or requeued without a batch that more of the same won't help."""
        rules = self.rules
        return 0 < rules.max_resample_rounds * rules.groups_per_batch <= self.state.resampled

    @property
    def unjudgeable(self) -> bool:
        """Whether the verifier failed on so many groups without a batch, and on nine of ten, that the run has no sense."""
        failed = self.state.unjudged
        return 0 < self.rules.max_failed_groups <= failed and failed >= 9 * len(self.state.complete)

    @property
    def goal(self) -> str | None:
        """Why there's nothing left to train, or None: `steps`; `end_of_data` once all that was admitted is consumed; or
        `max_resample_rounds` once what there was is; `verify_failed_all` where no verifier can judge what is generated."""
        if self.depth >= self.rules.steps:
            return "steps"
        if self.out_of_data and not self.state.open_train and self.depth >= self.state.next_depth:
            return "end_of_data"
        if self.resampled_out and not self.state.open_train and self.depth >= self.state.next_depth:
            return "max_resample_rounds"
        if self.unjudgeable and not self.state.open_train and self.depth >= self.state.next_depth:
            return VERIFY_FAILED_ALL
        return None

    @property
    def finished(self) -> bool:
        """Whether the run is over.

        An `end` in CONTROL stands as long as its goal does. Where run.steps was raised or the data grew, the run goes on, and
        the first task after the `end` takes it out of force; where a trainer went back below its depth, the fork record does.
        """
        return self.state.ended is not None and self.goal is not None


def seed_of(*parts: int | str) -> int:
    """A seed in [0, 2^63) that these parts alone decide."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode()) >> 1
