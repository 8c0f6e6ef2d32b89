"""CONTROL's decisions, folded as they come: the points of the curves, and where to find what was decided of a sample.

Tasks aren't read: they are most of CONTROL, and whoever wants one has its sequence. What is kept is bounded: the oldest goes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from towline.bus.client import Message
from towline.bus.topology import Topology
from towline.contract.control import (
    BatchRecord,
    CancelRecord,
    DropRecord,
    EndRecord,
    EvalRecord,
    ForkRecord,
    Record,
    ReissueRecord,
    decode_control,
)
from towline.errors import MalformedError
from towline.report.history import BatchPoint, point_of
from towline.store.lineage import Lineage
from towline.view.samples import Consumed, SampleIndex

KINDS = ("batch", "eval", "drop", "fork", "cancel", "end")
MOST_BATCHES = 100_000
MOST_GROUPS = 100_000
"""Groups that were dropped, or issued again, whose records can be found."""
_CANDIDATES = 64
"""Batches at most that are read to find the one that holds a sample."""


def subjects(topology: Topology) -> list[str]:
    """What of CONTROL is read."""
    return [*(topology.control(kind) for kind in KINDS), topology.subject("control.reissue.>")]


@dataclass(frozen=True, slots=True)
class BatchFound:
    """A batch: its point, its place in CONTROL, and the range of TRAJECTORY that its rows are of."""

    point: BatchPoint
    epoch: int
    sequence: int
    first_row: int
    last_row: int


@dataclass(frozen=True, slots=True)
class EvalFound:
    """A closed evaluation; `mean` is None where nothing could be scored."""

    version: int
    depth: int
    mean: float | None
    wanted: int
    rows: int
    sequence: int
    first_row: int
    last_row: int


@dataclass(slots=True)
class Decisions:
    """`take` every record in CONTROL's order."""

    samples: SampleIndex
    batches: OrderedDict[tuple[int, int], BatchFound] = field(default_factory=OrderedDict)
    """(epoch, for_depth) -> its batch."""
    evals: dict[int, EvalFound] = field(default_factory=dict)
    """By version."""
    drops: Counter[str] = field(default_factory=Counter)
    """Reason -> samples."""
    forks: list[tuple[int, ForkRecord]] = field(default_factory=list)
    ended: EndRecord | None = None
    taken: int = 0
    """Records that were."""
    dropped: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Group -> its drop's place in CONTROL."""
    _again: OrderedDict[int, list[int]] = field(default_factory=OrderedDict)
    """Group -> places of what concerns single samples of it: issued again, cancelled."""
    _fresh_drops: list[int] = field(default_factory=list)

    def take(self, message: Message) -> None:
        try:
            record = decode_control(message.data)
        except MalformedError:
            return  # of a later release, or broken: the audit says so
        self.taken += 1
        self._record(record, message)

    def settle(self) -> None:
        """Once after many records: what is cheaper for all of them together."""
        self.samples.drop(self._fresh_drops)
        self._fresh_drops.clear()

    def _record(self, record: Record, message: Message) -> None:
        match record:
            case BatchRecord():
                rows = [row.sequence for row in record.rows]
                found = BatchFound(point_of(record), record.epoch, message.sequence, min(rows, default=0), max(rows, default=0))
                self.batches[record.epoch, record.for_depth] = found
                self.samples.batch(record)
                _bound(self.batches, MOST_BATCHES)
            case EvalRecord():
                rows = [row.sequence for row in record.rows]
                self.evals[record.version] = EvalFound(
                    record.version, record.depth, record.mean, record.wanted, len(rows), message.sequence,
                    min(rows, default=0), max(rows, default=0),
                )  # fmt: skip
                self.samples.evaluation(record)
            case DropRecord():
                self.drops[record.reason] += record.samples
                self.dropped[record.group] = message.sequence
                self._fresh_drops.append(record.group)
                _bound(self.dropped, MOST_GROUPS)
            case ForkRecord():
                self.settle()
                self.forks.append((message.sequence, record))
                self.samples.fork(record)
                if self.ended is not None and record.depth < self.ended.depth:
                    self.ended = None
            case ReissueRecord(task=task):
                self._note(task.group, message.sequence)
            case CancelRecord():
                self._note(record.group, message.sequence)
                self._note(record.group, record.task_sequence)
            case EndRecord():
                self.ended = record
            case _:
                pass

    def concerning(self, group: int, trajectory: int | None, tasks: Iterable[int]) -> list[int]:
        """Places in CONTROL of all that may concern a sample, in order: its tasks, and by its group and its trajectory's place
        the rest. Some may turn out to concern others."""
        found = {*tasks, *self._again.get(group, ()), *(sequence for sequence, _ in self.forks)}
        if group in self.dropped:
            found.add(self.dropped[group])
        if trajectory is not None:
            holding = [one.sequence for one in reversed(self.batches.values()) if one.first_row <= trajectory <= one.last_row]
            found.update(holding[:_CANDIDATES])
            found.update(one.sequence for one in self.evals.values() if one.first_row <= trajectory <= one.last_row)
        return sorted(found)

    def line(self, lineage: Lineage, depths: Mapping[int, tuple[int, int]]) -> list[BatchFound]:
        """The batches that the line consumed (`depths`, as of `line_epochs`) and those that it may consume next, by depth."""
        if not lineage.versions():
            return sorted(self.batches.values(), key=lambda one: one.point.depth)
        spans = sorted((first, end, epoch) for epoch, (first, end) in depths.items())
        places = [(epoch, depth) for first, end, epoch in spans for depth in range(first, end)]
        newest, next_depth = lineage.newest_epoch, lineage.depth(lineage.latest)
        while newest is not None and (newest, next_depth) in self.batches:
            places.append((newest, next_depth))
            next_depth += 1
        return [self.batches[place] for place in places if place in self.batches]

    def _note(self, group: int, sequence: int) -> None:
        self._again.setdefault(group, []).append(sequence)
        _bound(self._again, MOST_GROUPS)


def line_epochs(lineage: Lineage) -> dict[int, tuple[int, int]]:
    """Epoch -> depths [first, end) that the line has consumed of its batches."""
    found: dict[int, tuple[int, int]] = {}
    below = 0
    for number in lineage.path():
        epoch, depth = lineage.epoch_of(number), lineage.depth(number)
        if epoch is not None:
            found[epoch] = (found.get(epoch, (below, 0))[0], depth)
        below = depth
    return found


def consumed(lineage: Lineage, skipped: Sequence[int]) -> Consumed:
    """`skipped`: the depths of the line that changed nothing."""
    return Consumed(line_epochs(lineage) if lineage.versions() else {}, frozenset(skipped))


def _bound(kept: OrderedDict[Any, Any], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)
