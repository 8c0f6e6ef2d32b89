"""The buffer's state: a pure function of CONTROL, OUTCOME and the records' order in each, without clocks or I/O.

`apply` takes CONTROL records, `apply_outcome` outcomes. How the two streams interleave doesn't matter: a restarted buffer
that reads all of CONTROL first and OUTCOME after it holds an equal state (`dump`), so whatever a killed one decided and
didn't append is decided again. The LOG is no part of the state: the decider looks at the lineage, and what it concludes
stands in CONTROL.

facts.py names the facts, indexes.py what is looked up about them, outcomes.py what OUTCOME changes; here is what CONTROL does.
"""

from __future__ import annotations

import heapq
import math

from towline.buffer.groups import Batch, Group, Sample
from towline.buffer.outcomes import VERIFY_FAILED, Outcomes
from towline.buffer.totals import Totals
from towline.contract.control import (
    AdmitRecord,
    BatchRecord,
    CancelRecord,
    DropRecord,
    EndRecord,
    EvalRecord,
    ForkRecord,
    OverStale,
    Record,
    ReissueRecord,
    RequeueRecord,
    SnapshotRecord,
    TaskRecord,
    WriterRecord,
)
from towline.contract.groups import EXTERNAL, is_external
from towline.contract.task import SESSION, Task
from towline.errors import InvariantError

EQUAL_REWARDS = "equal_rewards"


class State(Outcomes):
    """The facts, as CONTROL changes them. `InvariantError` where a record can't follow what stands."""

    def apply(self, record: Record, sequence: int) -> None:
        """The record at `sequence` of CONTROL. `InvariantError` where it can't follow what stands."""
        if sequence <= self.control_sequence:
            raise InvariantError(f"CONTROL went backwards: {sequence} after {self.control_sequence}", code="stream_regressed")
        self.control_sequence = sequence
        match record:
            case TaskRecord(task=task, requeues=requeues):
                if isinstance(requeues, int):
                    self.requeue.pop(requeues, None)
                self._admit(task, sequence)
            case ReissueRecord(task=task):
                self._reissue(task, sequence)
            case BatchRecord():
                self._batch(record, sequence)
            case DropRecord():
                self._drop(record)
            case CancelRecord():
                self._cancel(record)
            case EvalRecord():
                self._close_eval(record)
            case ForkRecord():
                self._fork(record, sequence)
            case EndRecord():
                self.ended = record
            case WriterRecord():
                self.writer = record.writer
            case SnapshotRecord(floor_depth=int(depth)):
                self._release(depth)
            case AdmitRecord():
                self._take_in(record, sequence)
            case RequeueRecord():
                self._requeue(record, sequence)
            case SnapshotRecord():
                pass  # it repeats the state

    def _admit(self, task: Task, sequence: int) -> None:
        group = self.groups.get(task.group)
        if group is None:
            if task.group < self.next_group:
                raise InvariantError(f"group {task.group} is admitted a second time, at {sequence}", code="group_reused")
            group = Group(
                task.group, task.lane, task.group_size, task.deadline, task.exact_version, task, [None] * task.group_size,
                admitted_sequence=sequence,
            )  # fmt: skip
            self.next_group = task.group + 1
            self.groups[task.group] = group
            heapq.heappush(self.deadlines, (task.deadline, task.group))
            if group.is_train:
                self.open_train[task.group] = None
            elif task.exact_version is not None:
                version = task.exact_version
                self.open_eval.setdefault(version, {})[task.group] = None
                self.eval_groups[version] = self.eval_groups.get(version, 0) + 1
                self.newest_eval = max(self.newest_eval, version)
        if group.samples[task.sample] is not None:
            raise InvariantError(f"sample {task.group}.{task.sample} is admitted a second time, at {sequence}", code="twice")
        group.samples[task.sample] = Sample(sequence, task.not_before_depth, task.attempt, task.seed, site=task.issued_to)
        self.admitted += 1
        self.ended = None
        if group.is_train:
            self.cursor = task.cursor

    def _take_in(self, record: AdmitRecord, sequence: int) -> None:
        """A sample of an external group; its scores are here already, or come when a replay has read OUTCOME."""
        number, group = record.group, self.groups.get(record.group)
        where = f"sample {number}.{record.sample}, admitted from outside at {sequence},"
        if group is None:
            if number in self.closed_external or not is_external(number):
                raise InvariantError(f"{where} is of a group that was closed, or is no external one", code="group_reused")
            group = self.forget_offer(number) or Group(
                number, EXTERNAL, record.group_size, math.inf, None, None, [None] * record.group_size
            )
            group.admitted_sequence = sequence
            self.groups[number] = group
            self.enter(group)
        if group.batch is not None or not 0 <= record.sample < group.size or record.group_size != group.size:
            raise InvariantError(f"{where} doesn't belong to the group", code="not_open")
        sample = group.samples[record.sample] or Sample(0, 0, 0, 0)
        if sample.task_sequence:
            raise InvariantError(f"{where} is admitted a second time", code="twice")
        sample.task_sequence = sequence
        group.samples[record.sample] = sample
        self.admitted += 1
        self.ended = None

    def _requeue(self, record: RequeueRecord, sequence: int) -> None:
        number = record.group
        if not 0 <= number < self.next_group or number in self.groups or number in self.requeue or number in self.requeued:
            raise InvariantError(f"group {number}, requeued at {sequence}, wasn't dropped, or was requeued before", code="twice")
        self.requeue[number] = record.task
        self.requeued[number] = record.dead

    def _reissue(self, task: Task, sequence: int) -> None:
        group = self.groups.get(task.group)
        sample = group.samples[task.sample] if group is not None else None
        if group is None or sample is None or group.batch is not None:
            raise InvariantError(f"sample {task.group}.{task.sample}, re-issued at {sequence}, isn't open", code="not_open")
        sample.task_sequence, sample.attempt, sample.not_before_depth = sequence, task.attempt, task.not_before_depth
        sample.site = task.issued_to
        key = (task.group, task.sample)
        self.failing.pop(key, None)
        self.stranded.pop(key, None)
        self.lost.pop(key, None)
        self.look_for_surplus(group, task.sample)

    def _batch(self, record: BatchRecord, sequence: int) -> None:
        depth = record.for_depth
        if record.epoch != self.epoch or depth in self.batches or depth < self.floor_depth:
            raise InvariantError(
                f"batch {record.epoch}/{depth}, at {sequence}, stands already or is of another epoch", code="twice"
            )
        staleness: dict[int, int] = {}
        tokens = token_staleness = 0
        numbers: dict[int, int] = {}
        over = {item.row: item.tokens for item in record.over_stale.rows} if isinstance(record.over_stale, OverStale) else {}
        for place, row in enumerate(record.rows):
            numbers[row.group] = numbers.get(row.group, 0) + 1
            if place in over:
                continue
            age = depth - row.least_depth
            staleness[age] = staleness.get(age, 0) + 1
            tokens += row.policy_tokens
            token_staleness += age * row.policy_tokens
        for number, rows in numbers.items():
            group = self.groups.get(number)
            if group is None or group.batch is not None or not group.is_train or rows != group.size:
                raise InvariantError(f"group {number}, batched at {sequence}, isn't open and whole", code="not_open")
            self.leave(group)
            group.batch = depth
            group.task = None
            group.samples = [None if sample is None else Sample(0, 0, 0, 0, scored=sample.scored) for sample in group.samples]
            group.pack()
        self.next_depth = depth + 1
        self.resampled = self.unjudged = 0
        batch = self.batches[depth] = Batch(
            record.epoch, depth, sequence, tuple(numbers), len(record.rows), staleness, tokens, token_staleness,
            len(over), sum(over.values()), sum(record.rows[place].policy_tokens for place in over),
            max((depth - record.rows[place].least_depth for place in over), default=0),
        )  # fmt: skip
        self.totals.add(batch)

    def _drop(self, record: DropRecord) -> None:
        group = self.groups.get(record.group)
        if group is None and is_external(record.group) and record.group not in self.closed_external:
            self._turn_away(record)
            return
        if group is None or group.batch is not None:
            raise InvariantError(f"group {record.group}, dropped as {record.reason}, isn't open", code="not_open")
        requeue = record.requeue is True
        if requeue and group.task is not None:
            self.requeue[record.group] = group.task
        self.resampled += requeue or record.reason == EQUAL_REWARDS
        self.unjudged += group.is_train and record.reason == VERIFY_FAILED
        self.leave(group)
        del self.groups[record.group]
        if group.is_external:
            self.closed_external[record.group] = None
        self.dropped[record.reason] = self.dropped.get(record.reason, 0) + record.samples

    def _turn_away(self, record: DropRecord) -> None:
        """An offer that was never admitted."""
        self.forget_offer(record.group)
        self.closed_external[record.group] = None
        offered = record.offered if isinstance(record.offered, int) else 0
        self.turned_away[record.reason] = self.turned_away.get(record.reason, 0) + offered

    def _cancel(self, record: CancelRecord) -> None:
        group = self.groups.get(record.group)
        sample = group.samples[record.sample] if group is not None and group.batch is None else None
        if sample is not None:
            sample.cancelled = max(sample.cancelled, record.task_sequence)
            self.surplus.pop((record.group, record.sample), None)

    def _close_eval(self, record: EvalRecord) -> None:
        for number in dict.fromkeys(row.group for row in record.rows):
            group = self.groups.get(number)
            if group is None or group.version != record.version:
                raise InvariantError(
                    f"group {number} isn't an open one of version {record.version}'s evaluation", code="not_open"
                )
            self.leave(group)
            del self.groups[number]
        if self.open_eval.get(record.version):
            raise InvariantError(f"version {record.version}'s evaluation is closed while groups of it are open", code="not_open")
        self.evaluated += len(record.rows)
        self.evals[record.version] = (record.depth, record.mean)
        self.eval_groups.pop(record.version, None)
        self.open_eval.pop(record.version, None)
        self.newest_eval = max(self.newest_eval, record.version)

    def _fork(self, record: ForkRecord, sequence: int) -> None:
        if record.epoch <= self.epoch:
            raise InvariantError(f"fork to epoch {record.epoch} after epoch {self.epoch}", code="epoch_regressed")
        if record.depth < self.floor_depth:
            raise InvariantError(f"fork to depth {record.depth}, below the floor {self.floor_depth}", code="below_floor")
        self.epoch, self.fork_depth, self.fork_sequence = record.epoch, record.depth, sequence
        if self.ended is not None and record.depth < self.ended.depth:
            self.ended = None
        void = [depth for depth in range(record.depth, self.next_depth) if depth in self.batches]
        self.next_depth = record.depth
        self.resampled = self.unjudged = 0
        for depth in void:
            for number in self.batches.pop(depth).groups:
                group = self.groups[number]
                group.batch = None
                group.unpack()
                self.enter(group)
        self.totals = self.counted()
        for number in self.open_train:
            for index, sample in enumerate(self.groups[number].samples):
                if sample is not None and sample.scored is None and sample.not_before_depth > record.depth:
                    self.stranded[number, index] = None
                else:
                    self.stranded.pop((number, index), None)

    def _release(self, depth: int) -> None:
        """Batches below `depth` are final: only their sums are kept."""
        for below in range(self.floor_depth, min(depth, self.next_depth)):
            batch = self.batches.pop(below, None)
            if batch is not None:
                for number in batch.groups:
                    self.groups.pop(number, None)
                    if is_external(number):
                        self.closed_external[number] = None
                self.finish(batch)
        self.floor_depth = max(self.floor_depth, min(depth, self.next_depth))

    def finish(self, batch: Batch) -> None:
        """It's final: count it among those."""
        self.final.add(batch)
        self.final_sequence = max(self.final_sequence, batch.sequence)

    def counted(self) -> Totals:
        """`totals`, batch by batch."""
        found = self.final.copy()
        for batch in self.batches.values():
            found.add(batch)
        return found

    def waiting_groups(self, depth: int) -> int:
        """Train groups that are admitted and not yet consumed in a lineage of this depth: open, or in a batch at or above it."""
        batched = sum(len(self.batches[d].groups) for d in range(depth, self.next_depth) if d in self.batches)
        return len(self.open_train) + batched

    def waiting_external(self, depth: int) -> int:
        """Of those, the external ones."""
        batched = (number for d in range(depth, self.next_depth) if d in self.batches for number in self.batches[d].groups)
        return sum(map(is_external, self.open_train)) + sum(map(is_external, batched))

    def waiting_session(self, depth: int) -> int:
        """Of those, the ones that clients claim."""
        batched = (number for d in range(depth, self.next_depth) if d in self.batches for number in self.batches[d].groups)
        return sum(self.groups[number].lane == SESSION for number in (*self.open_train, *batched))
