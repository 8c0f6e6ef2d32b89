"""The newest samples of a run as columns: what a list of trajectories shows and filters by, in bounded memory.

A sample's place is its sequence in TRAJECTORY, modulo the number that is kept: a new one takes the place of the oldest, and
nothing is ever searched for to be changed. A question costs a few passes over the columns, whatever the run's length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from towline.bundle.states import STATES, State
from towline.contract.control import BatchRecord, EvalRecord, ForkRecord
from towline.contract.groups import EXTERNAL, is_external
from towline.contract.outcome import Score
from towline.contract.trajectory import FinishReason

KEPT = 1 << 17
"""Samples that are kept unless said otherwise: about 20 MB."""
FINISHES: tuple[str, ...] = get_args(FinishReason)
_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFilter:
    """Everything given must hold; ranges are inclusive. `steps`: the depth that its batch trained; `versions`: that sampled it;
    `before`: only sequences below it."""

    before: int | None = None
    group: int | None = None
    sample: int | None = None
    lane: str | None = None
    state: State | None = None
    finish: str | None = None
    steps: tuple[int, int] | None = None
    versions: tuple[int, int] | None = None
    reward: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One of the list. `reward` is None until it's scored; `step` is the depth that its standing batch trained."""

    sequence: int
    group: int
    sample: int
    lane: str
    state: State
    at: float
    reward: float | None
    step: int | None
    version_start: int | None
    version_end: int | None
    policy_tokens: int
    total_tokens: int
    finish: str | None
    task_sequence: int


@dataclass(frozen=True, slots=True)
class Consumed:
    """What the LOG's line has consumed: epoch -> its depths [first, end), and those that changed nothing."""

    depths: Mapping[int, tuple[int, int]]
    skipped: frozenset[int]


class _Columns:
    """Arrays of one length, each by itself: a question reads only those that it's about."""

    def __init__(self, length: int) -> None:
        def whole(kind: str) -> npt.NDArray[np.int64]:
            return np.zeros(length, kind)

        self.sequence, self.group, self.task = whole("i8"), whole("i8"), whole("i8")
        self.sample, self.policy_tokens, self.total_tokens = whole("i4"), whole("i4"), whole("i4")
        self.version_start, self.version_end, self.depth = whole("i4"), whole("i4"), whole("i4")
        self.epoch, self.evaluated = whole("i4"), whole("i4")
        self.lane, self.finish = whole("u1"), whole("u1")
        self.at, self.reward = np.zeros(length), np.zeros(length, "f4")
        self.scored, self.dropped, self.differs = (np.zeros(length, bool) for _ in range(3))
        self.digest = [b""] * length
        self.sequence[:] = _NONE


class SampleIndex:
    """`kept` samples at most. Records may come before the score that they are about."""

    def __init__(self, kept: int = KEPT) -> None:
        self._columns = _Columns(kept)
        self._kept = kept
        self._lanes: list[str] = []
        self.newest = 0
        """The highest sequence seen."""

    @property
    def oldest(self) -> int:
        """No sample below it is kept."""
        return max(self.newest - self._kept + 1, 1)

    # What the streams say

    def score(self, score: Score, at: float, *, dropped: bool) -> None:
        """A sample is scored; `at` in Unix seconds. `dropped`: its group already was."""
        place = self._place(score.trajectory_sequence)
        c = self._columns
        if place is None or c.scored[place]:  # create-only: a second one is a reading's repeat
            return
        if c.depth[place] != _NONE:
            c.differs[place] = c.digest[place] != score.trajectory_digest
        numbers = [span.version for span in score.version_spans] or [_NONE]
        c.group[place], c.sample[place], c.task[place] = score.group, score.sample, score.task_sequence
        c.at[place], c.reward[place], c.digest[place] = at, score.reward, score.trajectory_digest
        c.policy_tokens[place], c.total_tokens[place] = score.policy_tokens, score.total_tokens
        c.version_start[place], c.version_end[place] = min(numbers), max(numbers)
        c.lane[place], c.finish[place], c.scored[place] = self._lane(score.lane), FINISHES.index(score.finish), True
        if dropped:
            c.dropped[place] = True

    def batch(self, record: BatchRecord) -> None:
        c = self._columns
        for one in record.rows:
            if (place := self._place(one.sequence)) is None:
                continue
            if c.scored[place]:
                c.differs[place] = c.digest[place] != one.digest
            else:
                c.group[place], c.sample[place], c.digest[place] = one.group, one.sample, one.digest
            c.depth[place], c.epoch[place] = record.for_depth, record.epoch

    def evaluation(self, record: EvalRecord) -> None:
        c = self._columns
        for one in record.rows:
            if (place := self._place(one.sequence)) is not None:
                c.group[place], c.sample[place], c.evaluated[place] = one.group, one.sample, record.version

    def fork(self, record: ForkRecord) -> None:
        """Batches of other epochs at its depth or above are void."""
        c = self._columns
        c.depth[(c.depth >= record.depth) & (c.epoch != record.epoch)] = _NONE

    def drop(self, groups: Iterable[int]) -> None:
        if wanted := list(groups):
            self._columns.dropped |= np.isin(self._columns.group, wanted) & (self._columns.sequence != _NONE)

    def seen(self, sequence: int) -> None:
        """TRAJECTORY reaches this far."""
        self.newest = max(self.newest, sequence)

    # What is asked

    def select(self, wanted: SampleFilter, limit: int, consumed: Consumed) -> tuple[list[SampleRow], int]:
        """The newest first, at most `limit`; and how many of the kept ones there are in all (older than `before` ones too)."""
        c = self._columns
        taken = (c.sequence >= self.oldest) & (c.scored | (c.depth != _NONE) | (c.evaluated != _NONE))
        if wanted.group is not None:
            taken &= c.group == wanted.group
        if wanted.sample is not None:
            taken &= c.sample == wanted.sample
        if wanted.lane is not None:
            taken &= c.scored & (c.lane == (self._lanes.index(wanted.lane) if wanted.lane in self._lanes else 255))
        if wanted.finish is not None:
            taken &= c.scored & (c.finish == (FINISHES.index(wanted.finish) if wanted.finish in FINISHES else 255))
        if wanted.steps is not None:
            taken &= (c.depth >= wanted.steps[0]) & (c.depth <= wanted.steps[1]) & (c.depth != _NONE)
        if wanted.versions is not None:
            taken &= c.scored & (c.version_start <= wanted.versions[1]) & (c.version_end >= wanted.versions[0])
        if wanted.reward is not None:
            taken &= c.scored & (c.reward >= wanted.reward[0]) & (c.reward <= wanted.reward[1])
        if wanted.state is not None:
            taken &= self._states(consumed) == STATES.index(wanted.state)
        total = int(taken.sum())
        places = np.flatnonzero(taken)
        cut = int(np.searchsorted(places, self.newest % self._kept, side="right"))
        found = np.concatenate([places[:cut][::-1], places[cut:][::-1]])  # the newest first
        if wanted.before is not None:
            found = found[c.sequence[found] < wanted.before]
        chosen = found[:limit]
        states = self._states(consumed, chosen)
        return [self._row(int(place), int(state)) for place, state in zip(chosen, states, strict=True)], total

    def get(self, sequence: int, consumed: Consumed) -> SampleRow | None:
        place = sequence % self._kept
        if self._columns.sequence[place] != sequence:
            return None
        return self._row(place, int(self._states(consumed, np.array([place]))[0]))

    def unscored(self, before: int, limit: int) -> list[int]:
        """Sequences below `before`, the newest first, of which no score is known: they may not be there."""
        span = np.arange(min(before - 1, self.newest), self.oldest - 1, -1)
        places = span % self._kept
        known = (self._columns.sequence[places] == span) & self._columns.scored[places]
        return [int(sequence) for sequence in span[~known][:limit]]

    def counts(self, consumed: Consumed) -> dict[str, int]:
        """State -> how many of the kept samples."""
        known = (self._columns.sequence >= self.oldest) & self._columns.scored
        counted = np.bincount(self._states(consumed)[known], minlength=len(STATES))
        return {name: int(count) for name, count in zip(STATES, counted, strict=True) if count}

    def _states(self, consumed: Consumed, places: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.uint8]:
        """Places in STATES, by the same order of reasons as `trace`'s."""
        c, at = self._columns, slice(None) if places is None else places
        code = {name: number for number, name in enumerate(STATES)}
        states = np.where(c.scored[at], code["scored"], code["generated"]).astype(np.uint8)
        states[c.dropped[at]] = code["dropped"]
        states[c.evaluated[at] != _NONE] = code["evaluated"]
        depth, epoch = c.depth[at], c.epoch[at]
        batched = depth != _NONE
        states[batched] = code["batched"]
        for number, (first, end) in consumed.depths.items():
            inside = batched & (epoch == number) & (depth >= first) & (depth < end)
            states[inside] = code["trained"]
            if consumed.skipped:
                states[inside & np.isin(depth, list(consumed.skipped))] = code["skipped"]
            states[inside & c.differs[at]] = code["missing"]
        return states

    def _row(self, place: int, state: int) -> SampleRow:
        c = self._columns
        scored, group, depth = bool(c.scored[place]), int(c.group[place]), int(c.depth[place])
        return SampleRow(
            sequence=int(c.sequence[place]), group=group, sample=int(c.sample[place]),
            lane=self._lanes[int(c.lane[place])] if scored else EXTERNAL if is_external(group) else "train",
            state=STATES[state], at=float(c.at[place]), reward=float(c.reward[place]) if scored else None,
            step=None if depth == _NONE else depth, version_start=_known(c.version_start[place]),
            version_end=_known(c.version_end[place]), policy_tokens=int(c.policy_tokens[place]),
            total_tokens=int(c.total_tokens[place]), finish=FINISHES[int(c.finish[place])] if scored else None,
            task_sequence=int(c.task[place]),
        )  # fmt: skip

    def _place(self, sequence: int) -> int | None:
        """Where the sample is, or is to be; None where it's older than what is kept."""
        self.seen(sequence)
        if sequence < self.oldest:
            return None
        place, c = sequence % self._kept, self._columns
        if c.sequence[place] != sequence:
            c.sequence[place] = sequence
            c.scored[place] = c.dropped[place] = c.differs[place] = False
            c.depth[place] = c.epoch[place] = c.evaluated[place] = c.version_start[place] = c.version_end[place] = _NONE
            c.policy_tokens[place] = c.total_tokens[place] = c.task[place] = c.at[place] = 0
        return place

    def _lane(self, name: str) -> int:
        if name not in self._lanes:
            self._lanes.append(name)
        return self._lanes.index(name)


def _known(value: Any) -> int | None:
    return None if value == _NONE else int(value)
