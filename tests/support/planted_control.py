"""A CONTROL that follows the rules, drawn by chance; and what it says of each sample, folded from every record of it."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from towline.bundle.manifest import StreamRecord
from towline.bundle.source import matcher
from towline.bus.client import Message
from towline.bus.topology import StreamSpec, Topology
from towline.contract.codec import encode
from towline.contract.control import (
    AdmitRecord,
    BatchRecord,
    BatchRow,
    CancelRecord,
    DropRecord,
    EvalRecord,
    EvalRow,
    ForkRecord,
    OverStale,
    OverStaleRow,
    Record,
    ReissueRecord,
    RequeueRecord,
    TaskRecord,
    WriterRecord,
)
from towline.contract.task import Cursor, PromptRef, SamplingParams, Task, pack_tokens

FIELDS: dict[str, Any] = {"writer": "w/1"}


def task_of(run: str, group: int, sample: int, size: int, attempt: int = 0, version: int | None = None) -> Task:
    return Task(
        run=run, lane="train" if version is None else "eval", group=group, sample=sample, group_size=size,
        prompt=pack_tokens([1, 2, group]), prompt_ref=PromptRef("s", 0, group), cursor=Cursor(0, group),
        sampling=SamplingParams(max_tokens=4), seed=group, not_before_depth=group % 3, exact_version=version, attempt=attempt,
        admitted_at=1000.0 + group, deadline=2000.0,
    )  # fmt: skip


@dataclass
class Draw:
    """`records` of `steps` decisions, with their subjects."""

    topology: Topology
    seed: int
    steps: int = 150
    records: list[tuple[str, Record]] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    """Of all groups that were met."""

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)
        self._open: dict[int, int | None] = {}
        """Group -> the version that it evaluates."""
        self._batched: dict[int, list[int]] = {}
        self._task_at: dict[tuple[int, int], int] = {}
        self._attempt: dict[tuple[int, int], int] = {}
        self._owed: list[int] = []
        self._dropped: list[int] = []
        self._group, self._outside, self._epoch, self._depth = 0, 0, 1, 0
        moves = [self._admit, self._admit_outside, self._reissue, self._cancel, self._drop, self._requeue, self._batch,
                 self._batch, self._fork, self._evaluate, self._take_over]  # fmt: skip
        for _ in range(3):
            self._admit()
        while len(self.records) < self.steps:
            self._dice.choices(moves, [6, 1, 2, 2, 2, 1, 4, 4, 1, 2, 1])[0]()

    def _add(self, subject: str, record: Record) -> int:
        self.records.append((subject, record))
        return len(self.records)

    def _admit(self) -> None:
        for _ in range(self._dice.randint(1, 3)):
            group, size = self._group, self._dice.randint(1, 5)
            self._group += 1
            version = self._dice.randint(0, 9) if self._dice.random() < 0.2 else None
            owed = {"requeues": self._owed.pop(0)} if self._owed and version is None and self._dice.random() < 0.6 else {}
            self._open[group], self.sizes[group] = version, size
            for sample in range(size):
                task = task_of(self.topology.run, group, sample, size, version=version)
                self._task_at[group, sample] = self._add(
                    self.topology.task(task.lane, version), TaskRecord(**FIELDS, task=task, **owed)
                )

    def _admit_outside(self) -> None:
        self._outside -= 1
        size = self._dice.randint(1, 3)
        self.sizes[self._outside] = size
        if self._dice.random() < 0.3:
            record = DropRecord(**FIELDS, lane="external", group=self._outside, samples=0, reason="unpaced", offered=1)
            self._add(self.topology.control("drop"), record)
            return
        self._open[self._outside] = None
        for sample in range(size):
            record = AdmitRecord(**FIELDS, lane="external", group=self._outside, sample=sample, group_size=size)
            self._add(self.topology.control("admit"), record)

    def _reissue(self) -> None:
        key = self._one(inside=True)
        if key is not None:
            self._attempt[key] = self._attempt.get(key, 0) + 1
            task = task_of(self.topology.run, *key, self.sizes[key[0]], self._attempt[key], self._open[key[0]])
            subject = self.topology.reissue(task.lane, task.exact_version)
            self._task_at[key] = self._add(subject, ReissueRecord(**FIELDS, task=task, reason="late"))

    def _cancel(self) -> None:
        """Of an open group's sample, or of one that was decided before."""
        known = sorted(self._task_at)
        key = self._dice.choice(known)
        record = CancelRecord(**FIELDS, group=key[0], sample=key[1], task_sequence=self._task_at[key], reason="stale")
        self._add(self.topology.control("cancel"), record)

    def _drop(self) -> None:
        key = self._one()
        if key is not None:
            again = key[0] >= 0 and self._dice.random() < 0.5
            del self._open[key[0]]
            (self._owed if again else self._dropped).append(key[0])
            fields = {"requeue": True} if again else {}
            record = DropRecord(
                **FIELDS, lane="train", group=key[0], samples=self.sizes[key[0]], reason="deadline", **fields
            )  # fmt: skip
            self._add(self.topology.control("drop"), record)

    def _requeue(self) -> None:
        inside = [group for group in self._dropped if group >= 0]
        if inside:
            group = self._dice.choice(inside)
            self._dropped.remove(group)
            self._owed.append(group)
            record = RequeueRecord(**FIELDS, dead=1, group=group, task=task_of(self.topology.run, group, 0, self.sizes[group]))
            self._add(self.topology.control("requeue"), record)

    def _batch(self) -> None:
        ready = [group for group, version in self._open.items() if version is None]
        if not ready:
            return
        groups = self._dice.sample(ready, min(self._dice.randint(1, 3), len(ready)))
        rows = tuple(
            BatchRow(group, sample, abs(group) * 8 + sample, bytes([abs(group) % 200, sample]) + bytes(14), 0.5, self._depth, 4)
            for group in groups
            for sample in range(self.sizes[group])
        )
        over = OverStale(mode="mask", max_staleness=1, rows=(OverStaleRow(len(rows) - 1, 2),))
        said = {"over_stale": over} if self._dice.random() < 0.4 else {}
        record = BatchRecord(
            **FIELDS, epoch=self._epoch, for_depth=self._depth, rows=rows, at=3000.0 + self._depth, **said
        )  # fmt: skip
        self._add(self.topology.control("batch"), record)
        self._batched[self._depth] = groups
        self._depth += 1
        for group in groups:
            del self._open[group]

    def _fork(self) -> None:
        depth = self._dice.randint(max(self._depth - 6, 0), self._depth)
        self._epoch += 10
        self._add(self.topology.control("fork"), ForkRecord(**FIELDS, epoch=self._epoch, base=0, depth=depth))
        for void in range(depth, self._depth):
            self._open |= dict.fromkeys(self._batched.pop(void))
        self._depth = depth

    def _evaluate(self) -> None:
        found = [group for group, version in self._open.items() if version is not None]
        if found:
            version = self._open[found[0]]
            assert version is not None
            groups = [group for group in found if self._open[group] == version]
            rows = tuple(EvalRow(group, sample, 1, bytes(16), 1.0) for group in groups for sample in range(self.sizes[group]))
            record = EvalRecord(**FIELDS, version=version, depth=0, wanted=len(rows), rows=rows, mean=version / 10)
            self._add(self.topology.control("eval"), record)
            for group in groups:
                del self._open[group]

    def _take_over(self) -> None:
        self._add(self.topology.control("writer"), WriterRecord(**FIELDS, at=1.0))

    def _one(self, *, inside: bool = False) -> tuple[int, int] | None:
        groups = [group for group in self._open if group >= 0 or not inside]
        if not groups:
            return None
        group = self._dice.choice(groups)
        return group, self._dice.randrange(self.sizes[group])


@dataclass(slots=True)
class Said:
    """What CONTROL has of a sample. attempts: [place, why again, why cancelled]; batches: [place, the epoch that voided it]."""

    attempts: list[list[Any]] = field(default_factory=list)
    batches: list[list[Any]] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    dropped: str | None = None
    requeued: bool = False
    again_in: int | None = None
    prompt_of: int | None = None
    evaluated: int | None = None
    size: int = 0


def fold(records: Iterable[tuple[int, Record]], group: int, sample: int) -> Said:
    """From every record, one after the other."""
    said, key, depths = Said(), (group, sample), dict[int, tuple[int, int]]()
    for place, record in records:
        if isinstance(record, TaskRecord | ReissueRecord) and (record.task.group, record.task.sample) == key:
            said.attempts.append([place, getattr(record, "reason", None), None])
        if isinstance(record, TaskRecord) and (record.task.group, record.task.sample) == key:
            said.size = record.task.group_size
            said.prompt_of = record.requeues if isinstance(record.requeues, int) else None
        if isinstance(record, TaskRecord) and record.requeues == group:
            said.again_in = record.task.group
        if isinstance(record, AdmitRecord) and (record.group, record.sample) == key:
            said.size = record.group_size
        if isinstance(record, CancelRecord) and (record.group, record.sample) == key:
            for attempt in said.attempts:
                attempt[2] = record.reason if attempt[0] == record.task_sequence else attempt[2]
        if isinstance(record, DropRecord) and record.group == group:
            said.dropped, said.requeued = record.reason, record.requeue is True
        if isinstance(record, RequeueRecord) and record.group == group:
            said.requeued = True
        if isinstance(record, BatchRecord):
            for number, row in enumerate(record.rows):
                if (row.group, row.sample) == key:
                    said.batches.append([place, None])
                    depths[place] = record.epoch, record.for_depth
                    over = record.over_stale.rows if isinstance(record.over_stale, OverStale) else ()
                    said.over.append(sum(one.tokens for one in over if one.row == number))
        if isinstance(record, ForkRecord):
            for batch in said.batches:
                epoch, depth = depths[batch[0]]
                if batch[1] is None and depth >= record.depth and epoch != record.epoch:
                    batch[1] = record.epoch
        if isinstance(record, EvalRecord) and any((row.group, row.sample) == key for row in record.rows):
            said.evaluated = record.version
    return said


class KeptControl:
    """CONTROL in memory, from place `first` on, as a `Source` shows it; `fetched` counts messages."""

    def __init__(self, topology: Topology, records: Sequence[tuple[str, Record]], first: int = 1) -> None:
        self.topology = topology
        self._messages = {
            place: Message(subject, place, encode(record), {}, 5000.0 + place)
            for place, (subject, record) in enumerate(records, 1)
            if place >= first
        }
        self.fetched = 0

    async def read(
        self, spec: StreamSpec, *, start: int = 1, subjects: Sequence[str] | None = None
    ) -> AsyncGenerator[Message, None]:
        matches = matcher(subjects)
        for place, message in self._messages.items():
            if place >= start and matches(message.subject):
                self.fetched += 1
                yield message

    async def get_many(self, spec: StreamSpec, sequences: Sequence[int]) -> list[Message | None]:
        self.fetched += len(sequences)
        return [self._messages.get(sequence) for sequence in sequences]

    async def state(self, spec: StreamSpec) -> StreamRecord:
        places = list(self._messages)
        return StreamRecord(created_at="", first=places[0], last=places[-1], messages=len(places))
