"""The auditor's own reading of CONTROL: what became of every admitted sample, and each record that can't follow the others."""

from __future__ import annotations

from dataclasses import dataclass, field

from towline.audit.again import Again, prompt_of
from towline.audit.line import Line
from towline.audit.report import Counts, Violation
from towline.contract.control import (
    AdmitRecord,
    BatchRecord,
    DropRecord,
    EndRecord,
    EvalRecord,
    ForkRecord,
    Record,
    ReissueRecord,
    RequeueRecord,
    TaskRecord,
    WriterRecord,
)
from towline.contract.groups import EXTERNAL, is_external
from towline.contract.task import SESSION, TRAIN, Task

SampleKey = tuple[int, int]


@dataclass(slots=True)
class GroupSeen:
    lane: str
    size: int
    version: int | None
    samples: set[int] = field(default_factory=set)
    fate: str | None = None
    """`evaluated`, or the reason of its drop."""
    prompt: bytes | None = None
    """Of a train group: its prompt and where it came from, as one value to compare."""


@dataclass(slots=True)
class BatchSeen:
    sequence: int
    record: BatchRecord
    void: bool = False


class Ledger:
    """Fed with CONTROL's records in order by `read`; `close` compares with the LOG and counts."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.groups: dict[int, GroupSeen] = {}
        self.task_sequences: dict[int, SampleKey] = {}
        """CONTROL sequence of each task and re-issue -> its sample."""
        self.batches: list[BatchSeen] = []
        self.evals: list[EvalRecord] = []
        self.dropped: dict[str, int] = {}
        self.turned_away: dict[str, int] = {}
        """Reason -> scored samples of external groups that were dropped for it and never admitted."""
        self.evaluated = 0
        self.again = Again(self._fault)
        self.ended: EndRecord | None = None
        """The end that stands: a task after it, or a fork below its depth, takes the run up again."""
        self._standing: dict[SampleKey, BatchSeen] = {}
        self.begins_at = 0
        """CONTROL sequence of the first record that was there to read: what came before it is purged, not lost."""
        self.purged_batches = 0
        """Batches of the lineage whose records are purged."""
        self._first_group: int | None = None
        """The first group whose admission was there to read; groups are numbered in order."""
        self._named: set[tuple[int, int]] = set()
        self._epoch = 0
        self._writer: str | None = None

    def read(self, record: Record, sequence: int) -> None:
        """The record at `sequence`. What is wrong with it becomes a violation; it's taken as it stands all the same."""
        if not self.begins_at:
            self.begins_at = sequence
        self._check_writer(record, sequence)
        match record:
            case TaskRecord(task=task, requeues=requeues):
                self._task(task, sequence)
                again = requeues if isinstance(requeues, int) else None
                self.again.admitted(task, again, purged=again is not None and self._purged(again))
            case ReissueRecord(task=task):
                self._reissue(task, sequence)
            case AdmitRecord():
                self._take_in(record)
            case RequeueRecord():
                self._requeue(record)
            case BatchRecord():
                self._batch(record, sequence)
            case DropRecord():
                self._drop(record)
            case EvalRecord():
                self._eval(record)
            case ForkRecord():
                self._fork(record, sequence)
            case EndRecord():
                self.ended = record
            case _:
                pass

    def _fault(self, invariant: int, where: str, what: str) -> None:
        self.violations.append(Violation(invariant, where, what))

    def _check_writer(self, record: Record, sequence: int) -> None:
        writer = record.writer.rpartition("/")[0]
        if isinstance(record, WriterRecord) or (self._writer is None and self.begins_at > 1):
            self._writer = writer
        elif writer != self._writer:
            self._fault(2, f"CONTROL {sequence}", f"written by {writer!r} where {self._writer!r} had taken over: a fence broke")

    def _purged(self, group: int) -> bool:
        """Whether its admission lies before CONTROL's beginning."""
        return self.begins_at > 1 and (self._first_group is None or group < self._first_group)

    def _task(self, task: Task, sequence: int) -> None:
        if self._first_group is None:
            # Tasks of a group follow each other: where the first one seen isn't sample 0, the group's beginning is purged.
            self._first_group = task.group + (1 if self.begins_at > 1 and task.sample else 0)
        if self._purged(task.group):
            self.task_sequences[sequence] = (task.group, task.sample)
            return
        group = self.groups.setdefault(
            task.group, GroupSeen(task.lane, task.group_size, task.exact_version, prompt=prompt_of(task))
        )
        if is_external(task.group):
            self._fault(1, f"{task.group}.{task.sample}", "a task for an external group")
        self._admit(group, task.group, task.sample)
        self.task_sequences[sequence] = (task.group, task.sample)
        self.ended = None

    def _take_in(self, record: AdmitRecord) -> None:
        where = f"{record.group}.{record.sample}"
        if not is_external(record.group) or record.lane != EXTERNAL:
            self._fault(1, where, f"admitted from outside, of lane {record.lane}: it must be below 0 and of lane {EXTERNAL}")
        if record.group not in self.groups and record.sample and self.begins_at > 1:
            return  # its first samples' records are purged, and the group is long closed
        group = self.groups.setdefault(record.group, GroupSeen(record.lane, record.group_size, None))
        if record.group_size != group.size or not 0 <= record.sample < group.size:
            self._fault(1, where, f"admitted from outside as one of {record.group_size}, its group has {group.size}")
        self._admit(group, record.group, record.sample)
        self.ended = None

    def _requeue(self, record: RequeueRecord) -> None:
        group = self.groups.get(record.group)
        if group is not None:
            self.again.asked(record, group.lane, group.fate, group.prompt)
        elif self._purged(record.group):
            self.again.purged(record)
        else:
            self.again.asked(record, None, None, None)

    def _admit(self, group: GroupSeen, number: int, sample: int) -> None:
        if sample in group.samples:
            self._fault(1, f"{number}.{sample}", "admitted twice")
        if group.fate is not None:
            self._fault(1, f"{number}.{sample}", f"admitted after its group was closed ({group.fate})")
        group.samples.add(sample)

    def _reissue(self, task: Task, sequence: int) -> None:
        group = self.groups.get(task.group)
        if self._purged(task.group):
            pass
        elif group is None or task.sample not in group.samples:
            self._fault(1, f"{task.group}.{task.sample}", f"issued again at CONTROL {sequence}, never admitted")
        elif group.fate is not None:
            self._fault(1, f"{task.group}.{task.sample}", f"issued again after its group was closed ({group.fate})")
        self.task_sequences[sequence] = (task.group, task.sample)

    def _batch(self, record: BatchRecord, sequence: int) -> None:
        name = f"{record.epoch}/{record.for_depth}"
        seen = BatchSeen(sequence, record)
        if self._epoch == 0 and self.begins_at > 1:
            self._epoch = record.epoch  # its fork is purged
        if record.epoch != self._epoch:
            self._fault(2, name, f"a batch of epoch {record.epoch} while the newest fork is to epoch {self._epoch}")
        if (record.epoch, record.for_depth) in self._named:
            self._fault(2, name, "a second batch for this epoch and depth")
        self._named.add((record.epoch, record.for_depth))
        rows: dict[int, set[int]] = {}
        for row in record.rows:
            where = f"{row.group}.{row.sample}"
            group = self.groups.get(row.group)
            if group is None and self._purged(row.group):
                continue
            if group is None or row.sample not in group.samples:
                self._fault(1, where, f"in batch {name}, never admitted")
                continue
            if group.fate is not None:
                self._fault(1, where, f"in batch {name} after its group was closed ({group.fate})")
            if group.lane not in (TRAIN, SESSION, EXTERNAL):
                self._fault(1, where, f"in batch {name}, of lane {group.lane}")
            before = self._standing.get((row.group, row.sample))
            if before is not None:
                other = f"{before.record.epoch}/{before.record.for_depth}"
                self._fault(2, where, f"in batch {name} and in batch {other}, which no fork has voided")
            self._standing[row.group, row.sample] = seen
            rows.setdefault(row.group, set()).add(row.sample)
        for number, samples in rows.items():
            if samples != set(range(self.groups[number].size)):
                self._fault(4, f"group {number}", f"in batch {name} with samples {sorted(samples)} of {self.groups[number].size}")
        self.batches.append(seen)

    def _drop(self, record: DropRecord) -> None:
        where = f"group {record.group}"
        group = self.groups.get(record.group)
        if isinstance(record.offered, int):
            self._turn_away(record, group)
            return
        if group is None and self._purged(record.group):
            return
        if group is None:
            self._fault(1, where, f"dropped as {record.reason}, never admitted")
            return
        if group.fate is not None:
            self._fault(1, where, f"dropped as {record.reason} after it was closed ({group.fate})")
            return
        for sample in sorted(group.samples):
            standing = self._standing.get((record.group, sample))
            if standing is not None:
                name = f"{standing.record.epoch}/{standing.record.for_depth}"
                self._fault(1, f"{record.group}.{sample}", f"dropped as {record.reason} while it stands in batch {name}")
        if record.samples != len(group.samples):
            self._fault(1, where, f"dropped with {record.samples} samples, {len(group.samples)} were admitted")
        group.fate = record.reason
        self.dropped[record.reason] = self.dropped.get(record.reason, 0) + len(group.samples)
        if record.requeue is True:
            self.again.promised(record.group, record.reason, group.prompt)

    def _turn_away(self, record: DropRecord, group: GroupSeen | None) -> None:
        """An external group that was only offered: nothing of it was admitted, and nothing of it may be."""
        where = f"group {record.group}"
        if not is_external(record.group) or record.samples != 0:
            self._fault(1, where, f"turned away as {record.reason} with {record.samples} samples: only external offers can be")
        if group is not None:
            state = f"it was closed ({group.fate})" if group.fate is not None else "it was admitted"
            self._fault(1, where, f"turned away as {record.reason} after {state}")
            return
        self.groups[record.group] = GroupSeen(record.lane, 0, None, fate=record.reason)
        offered = record.offered if isinstance(record.offered, int) else 0
        self.turned_away[record.reason] = self.turned_away.get(record.reason, 0) + offered

    def _eval(self, record: EvalRecord) -> None:
        seen: set[SampleKey] = set()
        for row in record.rows:
            where = f"{row.group}.{row.sample}"
            group = self.groups.get(row.group)
            if group is None and self._purged(row.group):
                continue
            if group is None or row.sample not in group.samples:
                self._fault(1, where, f"evaluated for version {record.version}, never admitted")
            elif group.fate is not None:
                self._fault(1, where, f"evaluated for version {record.version} after its group was closed ({group.fate})")
            elif group.version != record.version:
                self._fault(1, where, f"evaluated for version {record.version}, admitted for {group.version}")
            elif (row.group, row.sample) in seen:
                self._fault(1, where, f"evaluated twice for version {record.version}")
            seen.add((row.group, row.sample))
        for number in {row.group for row in record.rows}:
            group = self.groups.get(number)
            if group is not None and group.fate is None:
                group.fate = "evaluated"
                self.evaluated += len(group.samples)
                missing = {(number, sample) for sample in group.samples} - seen
                for _, sample in sorted(missing):
                    self._fault(1, f"{number}.{sample}", f"its group was evaluated for version {record.version} without it")
        mean = sum(row.reward for row in record.rows) / len(record.rows) if record.rows else None
        if (mean is None) != (record.mean is None) or (mean is not None and abs(mean - (record.mean or 0.0)) > 1e-9):
            self._fault(6, f"version {record.version}", f"evaluated with mean {record.mean}, its rows have {mean}")
        self.evals.append(record)

    def _fork(self, record: ForkRecord, sequence: int) -> None:
        if record.epoch <= self._epoch:
            self._fault(2, f"CONTROL {sequence}", f"a fork to epoch {record.epoch} after epoch {self._epoch}")
        self._epoch = record.epoch
        if self.ended is not None and record.depth < self.ended.depth:
            self.ended = None
        for batch in self.batches:
            if not batch.void and batch.record.for_depth >= record.depth:
                batch.void = True
                for row in batch.record.rows:
                    self._standing.pop((row.group, row.sample), None)

    def close(self, consumed: list[int]) -> Counts:
        """The counts, given the LOG's `Line.consumed()`. Finds batches that the lineage has and CONTROL doesn't, samples that
        count twice in it, and samples that are still open though the run has ended."""
        by_name = {(batch.record.epoch, batch.record.for_depth): batch for batch in self.batches}
        trained: dict[SampleKey, int] = {}
        for depth, epoch in enumerate(consumed):
            batch = by_name.get((epoch, depth))
            if batch is None and self.begins_at > 1 and depth < min((d for _, d in by_name), default=depth + 1):
                self.purged_batches += 1
                continue
            if batch is None or batch.void:
                state = "isn't in CONTROL" if batch is None else "a fork has voided"
                self._fault(2, f"{epoch}/{depth}", f"the lineage consumed a batch that {state}")
                continue
            for row in batch.record.rows:
                key = (row.group, row.sample)
                if key in trained:
                    self._fault(2, f"{row.group}.{row.sample}", f"trained at depth {trained[key]} and at depth {depth}")
                trained[key] = depth
        counts = Counts(evaluated=self.evaluated, dropped=dict(self.dropped), turned_away=dict(self.turned_away))
        for number, group in self.groups.items():
            counts.admitted += len(group.samples)
            in_lineage = [sample for sample in group.samples if (number, sample) in trained]
            if group.fate is None:
                counts.trained += len(in_lineage)
                counts.open += len(group.samples) - len(in_lineage)
                self._check_left(number, group, trained)
            else:
                for sample in in_lineage:
                    self._fault(1, f"{number}.{sample}", f"trained at depth {trained[number, sample]} and {group.fate}")
            if len(group.samples) != group.size:
                self._fault(1, f"group {number}", f"{len(group.samples)} of its {group.size} samples were admitted")
        return counts

    def check_cursors(self, line: Line) -> None:
        """Each version of the lineage names, as its batch cursor, the place of the batch that made its depth."""
        at = {batch.sequence: (batch.record.epoch, batch.record.for_depth) for batch in self.batches}
        for version in line.ancestors(line.latest) if line.latest is not None else []:
            if version in line.version_epochs and line.batch_cursors[version] >= self.begins_at:
                wanted = (line.version_epochs[version], line.depths[version] - 1)
                if at.get(line.batch_cursors[version]) != wanted:
                    name = f"batch {wanted[0]}/{wanted[1]}"
                    self._fault(2, f"version {version}", f"CONTROL {line.batch_cursors[version]}, its batch cursor, isn't {name}")

    def _check_left(self, number: int, group: GroupSeen, trained: dict[SampleKey, int]) -> None:
        if self.ended is None:
            return
        for sample in sorted(group.samples):
            # A batch beyond a run.steps that was lowered stays open: nobody trains it unless the run goes on.
            if (number, sample) not in trained and (number, sample) not in self._standing:
                self._fault(1, f"{number}.{sample}", f"still open though the run ended ({self.ended.reason})")
