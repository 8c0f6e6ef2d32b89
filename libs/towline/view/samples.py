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
"""Samples that are kept unless said otherwise: about 13 MB."""
FINISHES: tuple[str, ...] = get_args(FinishReason)
_COLUMNS = np.dtype(
    [
        ("sequence", "i8"), ("group", "i8"), ("task", "i8"), ("at", "f8"), ("reward", "f4"), ("sample", "i4"),
        ("policy_tokens", "i4"), ("total_tokens", "i4"), ("version_start", "i4"), ("version_end", "i4"), ("depth", "i4"),
        ("epoch", "i4"), ("evaluated", "i4"), ("lane", "u1"), ("finish", "u1"), ("scored", "?"), ("dropped", "?"),
        ("differs", "?"), ("digest", "V16"),
    ]
)  # fmt: skip
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


class SampleIndex:
    """`kept` samples at most. Records may come before the score that they are about."""

    def __init__(self, kept: int = KEPT) -> None:
        self._rows = np.zeros(kept, _COLUMNS)
        self._sequences = self._rows["sequence"]
        self._sequences[:] = _NONE
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
        sequence = score.trajectory_sequence
        self.seen(sequence)
        if sequence < self.oldest:
            return
        place = sequence % self._kept
        depth = epoch = evaluated = _NONE
        differs = False
        if self._sequences[place] == sequence:  # a decision about it was read before
            row: Any = self._rows[place]
            if row["scored"]:
                return  # create-only: a second one is a reading's repeat
            depth, epoch, evaluated, dropped = row["depth"], row["epoch"], row["evaluated"], dropped or bool(row["dropped"])
            differs = bool(depth != _NONE and row["digest"].tobytes() != score.trajectory_digest)
        numbers = [span.version for span in score.version_spans] or [_NONE]
        # One assignment of a whole row costs a tenth of one for each column.
        self._rows[place] = (
            sequence, score.group, score.task_sequence, at, score.reward, score.sample, score.policy_tokens, score.total_tokens,
            min(numbers), max(numbers), depth, epoch, evaluated, self._lane(score.lane), FINISHES.index(score.finish), True,
            dropped, differs, score.trajectory_digest,
        )  # fmt: skip

    def batch(self, record: BatchRecord) -> None:
        for one in record.rows:
            if (row := self._place(one.sequence)) is None:
                continue
            if row["scored"]:
                row["differs"] = row["digest"].tobytes() != one.digest
            else:
                row["group"], row["sample"], row["digest"] = one.group, one.sample, np.void(one.digest)
            row["depth"], row["epoch"] = record.for_depth, record.epoch

    def evaluation(self, record: EvalRecord) -> None:
        for one in record.rows:
            if (row := self._place(one.sequence)) is not None:
                row["group"], row["sample"], row["evaluated"] = one.group, one.sample, record.version

    def fork(self, record: ForkRecord) -> None:
        """Batches of other epochs at its depth or above are void."""
        rows = self._rows
        rows["depth"][(rows["depth"] >= record.depth) & (rows["epoch"] != record.epoch)] = _NONE

    def drop(self, groups: Iterable[int]) -> None:
        if wanted := list(groups):
            self._rows["dropped"] |= np.isin(self._rows["group"], wanted) & (self._rows["sequence"] != _NONE)

    def seen(self, sequence: int) -> None:
        """TRAJECTORY reaches this far."""
        self.newest = max(self.newest, sequence)

    # What is asked

    def select(self, wanted: SampleFilter, limit: int, consumed: Consumed) -> tuple[list[SampleRow], int]:
        """The newest first, at most `limit`; and how many of the kept ones there are in all (older than `before` ones too)."""
        rows, taken = self._rows, self._rows["sequence"] >= self.oldest
        taken &= rows["scored"] | (rows["depth"] != _NONE) | (rows["evaluated"] != _NONE)
        equal = {"group": wanted.group, "sample": wanted.sample}
        for name, value in equal.items():
            if value is not None:
                taken &= rows[name] == value
        if wanted.lane is not None:
            taken &= rows["lane"] == (self._lanes.index(wanted.lane) if wanted.lane in self._lanes else 255)
        if wanted.finish is not None:
            taken &= rows["scored"] & (rows["finish"] == (FINISHES.index(wanted.finish) if wanted.finish in FINISHES else 255))
        if wanted.steps is not None:
            taken &= (rows["depth"] >= wanted.steps[0]) & (rows["depth"] <= wanted.steps[1]) & (rows["depth"] != _NONE)
        if wanted.versions is not None:
            taken &= rows["scored"] & (rows["version_start"] <= wanted.versions[1]) & (rows["version_end"] >= wanted.versions[0])
        if wanted.reward is not None:
            taken &= rows["scored"] & (rows["reward"] >= wanted.reward[0]) & (rows["reward"] <= wanted.reward[1])
        if wanted.state is not None:
            taken &= self._states(consumed) == STATES.index(wanted.state)
        total = int(taken.sum())
        places = (self.newest - np.arange(self._kept)) % self._kept  # newest first
        found = places[taken[places]]
        if wanted.before is not None:
            found = found[rows["sequence"][found] < wanted.before]
        chosen = found[:limit]
        states = self._states(consumed, chosen)
        return [self._row(int(place), int(state)) for place, state in zip(chosen, states, strict=True)], total

    def get(self, sequence: int, consumed: Consumed) -> SampleRow | None:
        place = sequence % self._kept
        if self._rows["sequence"][place] != sequence:
            return None
        return self._row(place, int(self._states(consumed, np.array([place]))[0]))

    def unscored(self, before: int, limit: int) -> list[int]:
        """Sequences below `before`, the newest first, of which no score is known: they may not be there."""
        span = np.arange(min(before - 1, self.newest), self.oldest - 1, -1)
        places = span % self._kept
        known = (self._rows["sequence"][places] == span) & self._rows["scored"][places]
        return [int(sequence) for sequence in span[~known][:limit]]

    def counts(self, consumed: Consumed) -> dict[str, int]:
        """State -> how many of the kept samples."""
        known = (self._rows["sequence"] >= self.oldest) & self._rows["scored"]
        counted = np.bincount(self._states(consumed)[known], minlength=len(STATES))
        return {name: int(count) for name, count in zip(STATES, counted, strict=True) if count}

    def _states(self, consumed: Consumed, places: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.uint8]:
        """Places in STATES, by the same order of reasons as `trace`'s."""
        rows = self._rows if places is None else self._rows[places]
        code = {name: number for number, name in enumerate(STATES)}
        states = np.where(rows["scored"], code["scored"], code["generated"]).astype(np.uint8)
        states[rows["dropped"]] = code["dropped"]
        states[rows["evaluated"] != _NONE] = code["evaluated"]
        batched = rows["depth"] != _NONE
        states[batched] = code["batched"]
        for epoch, (first, end) in consumed.depths.items():
            inside = batched & (rows["epoch"] == epoch) & (rows["depth"] >= first) & (rows["depth"] < end)
            states[inside] = code["trained"]
            if consumed.skipped:
                states[inside & np.isin(rows["depth"], list(consumed.skipped))] = code["skipped"]
            states[inside & rows["differs"]] = code["missing"]
        return states

    def _row(self, place: int, state: int) -> SampleRow:
        row: Any = self._rows[place]
        scored = bool(row["scored"])
        group = int(row["group"])
        return SampleRow(
            sequence=int(row["sequence"]), group=group, sample=int(row["sample"]),
            lane=self._lanes[int(row["lane"])] if scored else EXTERNAL if is_external(group) else "train",
            state=STATES[state], at=float(row["at"]), reward=float(row["reward"]) if scored else None,
            step=None if row["depth"] == _NONE else int(row["depth"]),
            version_start=_known(row["version_start"]), version_end=_known(row["version_end"]),
            policy_tokens=int(row["policy_tokens"]), total_tokens=int(row["total_tokens"]),
            finish=FINISHES[int(row["finish"])] if scored else None, task_sequence=int(row["task"]),
        )  # fmt: skip

    def _place(self, sequence: int) -> Any:
        """The sample's row, a view; None where it's older than what is kept."""
        self.seen(sequence)
        if sequence < self.oldest:
            return None
        row = self._rows[sequence % self._kept]
        if row["sequence"] != sequence:
            row["sequence"], row["scored"], row["dropped"], row["differs"] = sequence, False, False, False
            for name in ("depth", "epoch", "evaluated", "version_start", "version_end"):
                row[name] = _NONE
            for name in ("policy_tokens", "total_tokens", "task", "at"):
                row[name] = 0
        return row

    def _lane(self, name: str) -> int:
        if name not in self._lanes:
            self._lanes.append(name)
        return self._lanes.index(name)


def _known(value: Any) -> int | None:
    return None if value == _NONE else int(value)
