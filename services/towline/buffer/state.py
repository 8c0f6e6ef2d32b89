"""The buffer's state: a pure function of CONTROL, OUTCOME and the records' order in each, without clocks or I/O.

`apply` takes CONTROL records, `apply_outcome` outcomes. How the two streams interleave doesn't matter: a restarted buffer
that reads all of CONTROL first and OUTCOME after it holds an equal state (`dump`), so whatever a killed one decided and
didn't append is decided again. The LOG is no part of the state: the decider looks at the lineage, and what it concludes
stands in CONTROL.

Beside the facts the state keeps indexes over them, so that deciding costs what has changed and not what is open.
"""

from __future__ import annotations

import heapq
import math

from msgspec.structs import replace

from towline.buffer.groups import Batch, Group, Sample, scored_from
from towline.contract.control import (
    AdmitRecord,
    BatchRecord,
    CancelRecord,
    DropRecord,
    EndRecord,
    EvalRecord,
    ForkRecord,
    Record,
    ReissueRecord,
    SnapshotRecord,
    TaskRecord,
    WriterRecord,
)
from towline.contract.outcome import Failure, Outcome, Score
from towline.contract.task import TRAIN, Cursor, Task
from towline.errors import InvariantError

UNCOUNTED_STAGES = ("not_ready", "version_moved")
"""Failures that say nothing about the sample: nobody served the version it needs in time."""
EQUAL_REWARDS = "equal_rewards"
_FINAL = {"malformed": "malformed", "verify": "verify_failed"}


class State:
    """Facts first, then the indexes. Readers may look at everything; only `apply` and `apply_outcome` change it."""

    def __init__(self) -> None:
        self.control_sequence = 0
        self.outcome_sequence = 0
        self.writer = ""
        self.next_group = 0
        self.cursor = Cursor(0, 0)
        """Of the newest train task: the next prompt to draw."""
        self.epoch = 0
        self.fork_depth = 0
        self.fork_sequence = 0
        self.floor_depth = 0
        """Batches below it are final, and their groups forgotten."""
        self.groups: dict[int, Group] = {}
        self.batches: dict[int, Batch] = {}
        """for_depth -> the batch that stands for it."""
        self.next_depth = 0
        """The depth that the next batch is for: batches follow each other, from the fork's depth on."""
        self.requeue: dict[int, Task] = {}
        """Dropped group -> its task: prompts to be admitted again, in order."""
        self.resampled = 0
        """Groups that were filtered or requeued since the newest batch or fork."""
        self.scored_samples = 0
        """Scores of lane train in OUTCOME, used or late."""
        self.scored_tokens = 0
        self.mixed_samples = 0
        """Of those, the ones whose tokens are of several versions."""
        self.admitted = 0
        """Samples, both lanes."""
        self.evaluated = 0
        self.dropped: dict[str, int] = {}
        self.evals: dict[int, tuple[int, float | None]] = {}
        """Version -> (depth, mean) of its closed evaluation."""
        self.eval_groups: dict[int, int] = {}
        """Version -> how many groups were ever issued for it; until its evaluation is closed."""
        self.eval_scores: dict[int, int] = {}
        self.newest_eval = -1
        self.ended: EndRecord | None = None
        """The end that stands: the newest one, unless a sample was admitted or a fork went below its depth after it."""
        self.late = 0
        """Outcomes that weren't used, as this process saw them (not a fact: a replay finds more of them late)."""
        self.unpaced = 0
        """Outcomes of lanes that nobody admits here, as this process saw them."""
        # indexes
        self.complete: dict[int, None] = {}
        """Open train groups with every score."""
        self.open_train: dict[int, None] = {}
        self.flat: dict[int, None] = {}
        """Of those, the ones whose rewards are all equal."""
        self.open_eval: dict[int, dict[int, None]] = {}
        """Version -> its eval groups that are neither dropped nor evaluated."""
        self.failing: dict[tuple[int, int], None] = {}
        self.doomed: dict[int, str] = {}
        """Group -> why no score can save it."""
        self.stranded: dict[tuple[int, int], None] = {}
        """Samples whose task waits for a depth that a fork took away."""
        self.surplus: dict[tuple[int, int], None] = {}
        """Samples that an earlier task scored after they had been issued again."""
        self.by_version: dict[int, dict[int, None]] = {}
        """Version -> open train groups that hold tokens of it."""
        self.lost: dict[tuple[int, int], None] = {}
        """Samples whose trajectory a stream lost, as this process found (not a fact)."""
        self._deadlines: list[tuple[float, int]] = []

    # CONTROL

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
            case SnapshotRecord() | AdmitRecord():
                pass  # a snapshot repeats the state; unpaced samples are the gateway's, which this buffer doesn't admit yet

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
            heapq.heappush(self._deadlines, (task.deadline, task.group))
            if group.is_train:
                self.open_train[task.group] = None
            elif task.exact_version is not None:
                version = task.exact_version
                self.open_eval.setdefault(version, {})[task.group] = None
                self.eval_groups[version] = self.eval_groups.get(version, 0) + 1
                self.newest_eval = max(self.newest_eval, version)
        if group.samples[task.sample] is not None:
            raise InvariantError(f"sample {task.group}.{task.sample} is admitted a second time, at {sequence}", code="twice")
        group.samples[task.sample] = Sample(sequence, task.not_before_depth, task.attempt, task.seed)
        self.admitted += 1
        self.ended = None
        if group.is_train:
            self.cursor = task.cursor

    def _reissue(self, task: Task, sequence: int) -> None:
        group = self.groups.get(task.group)
        sample = group.samples[task.sample] if group is not None else None
        if group is None or sample is None or group.batch is not None:
            raise InvariantError(f"sample {task.group}.{task.sample}, re-issued at {sequence}, isn't open", code="not_open")
        sample.task_sequence, sample.attempt, sample.not_before_depth = sequence, task.attempt, task.not_before_depth
        key = (task.group, task.sample)
        self.failing.pop(key, None)
        self.stranded.pop(key, None)
        self.lost.pop(key, None)
        self._look_for_surplus(group, task.sample)

    def _batch(self, record: BatchRecord, sequence: int) -> None:
        depth = record.for_depth
        if record.epoch != self.epoch or depth in self.batches:
            raise InvariantError(
                f"batch {record.epoch}/{depth}, at {sequence}, stands already or is of another epoch", code="twice"
            )
        staleness: dict[int, int] = {}
        tokens = token_staleness = 0
        numbers: dict[int, int] = {}
        for row in record.rows:
            age = depth - row.least_depth
            staleness[age] = staleness.get(age, 0) + 1
            tokens += row.policy_tokens
            token_staleness += age * row.policy_tokens
            numbers[row.group] = numbers.get(row.group, 0) + 1
        for number, rows in numbers.items():
            group = self.groups.get(number)
            if group is None or group.batch is not None or not group.is_train or rows != group.size:
                raise InvariantError(f"group {number}, batched at {sequence}, isn't open and whole", code="not_open")
            self._leave(group)
            group.batch = depth
            group.task = None
            group.samples = [None if sample is None else Sample(0, 0, 0, 0, scored=sample.scored) for sample in group.samples]
            group.pack()
        self.next_depth = depth + 1
        self.resampled = 0
        self.batches[depth] = Batch(
            record.epoch, depth, sequence, tuple(numbers), len(record.rows), staleness, tokens, token_staleness
        )

    def _drop(self, record: DropRecord) -> None:
        group = self.groups.get(record.group)
        if group is None or group.batch is not None:
            raise InvariantError(f"group {record.group}, dropped as {record.reason}, isn't open", code="not_open")
        requeue = record.requeue is True
        if requeue and group.task is not None:
            self.requeue[record.group] = group.task
        self.resampled += requeue or record.reason == EQUAL_REWARDS
        self._leave(group)
        del self.groups[record.group]
        self.dropped[record.reason] = self.dropped.get(record.reason, 0) + record.samples

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
            self._leave(group)
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
        self.resampled = 0
        for depth in void:
            for number in self.batches.pop(depth).groups:
                group = self.groups[number]
                group.batch = None
                group.unpack()
                self.enter(group)
        for number in self.open_train:
            for index, sample in enumerate(self.groups[number].samples):
                if sample is not None and sample.scored is None and sample.not_before_depth > record.depth:
                    self.stranded[number, index] = None
                else:
                    self.stranded.pop((number, index), None)

    def _release(self, depth: int) -> None:
        """Batches below `depth` are final: of their groups only the batch's figures are kept."""
        for below in range(self.floor_depth, min(depth, self.next_depth)):
            batch = self.batches.get(below)
            if batch is not None:
                for number in batch.groups:
                    self.groups.pop(number, None)
                self.batches[below] = replace(batch, groups=())
        self.floor_depth = max(self.floor_depth, min(depth, self.next_depth))

    # OUTCOME

    def apply_outcome(self, outcome: Outcome, sequence: int) -> None:
        """The outcome at `sequence` of OUTCOME. The first score of a sample stands, whichever of its tasks it names: a
        trajectory is create-only per sample, so there is only one. One of a closed group is late."""
        self.outcome_sequence = sequence
        if isinstance(outcome, Score) and outcome.lane == TRAIN:
            self.scored_samples += 1
            self.scored_tokens += outcome.policy_tokens
            self.mixed_samples += len({span.version for span in outcome.version_spans}) > 1
        group = self.groups.get(outcome.group)
        sample = group.samples[outcome.sample] if group is not None and 0 <= outcome.sample < len(group.samples) else None
        # A trajectory that can't be read says no lane: reward's failure of it has an empty one.
        foreign = group is not None and outcome.lane not in (group.lane, "")
        if group is None or sample is None or foreign or sample.scored is not None:
            if group is None and outcome.group >= self.next_group:
                self.unpaced += 1
            else:
                self.late += 1
        elif isinstance(outcome, Score):
            self._score(group, sample, outcome)
        elif group.task is not None:
            self._fail(group, sample, outcome)

    def _score(self, group: Group, sample: Sample, score: Score) -> None:
        sample.scored = scored_from(score)
        group.scores += 1
        if group.batch is not None:
            group.pack()  # a replay: CONTROL was read to its end first, and the batch already stands there
            return
        self.failing.pop((group.number, score.sample), None)
        self.stranded.pop((group.number, score.sample), None)
        self.lost.pop((group.number, score.sample), None)
        self._look_for_surplus(group, score.sample)
        if not math.isfinite(score.reward):
            self.doom(group, sample, "verify_failed")
        elif group.version is not None and sample.scored.versions != (group.version,):
            self.doom(group, sample, "wrong_version")
        self._index_score(group, sample)
        if group.complete:
            if group.is_train:
                self._index_complete(group)
            elif group.version is not None:
                self.eval_scores[group.version] = self.eval_scores.get(group.version, 0) + 1

    def _fail(self, group: Group, sample: Sample, failure: Failure) -> None:
        key = (failure.task_sequence, failure.delivery, failure.stage)
        if sample.failures is None:
            sample.failures = {}
        sample.failures.setdefault(key, failure.stage not in UNCOUNTED_STAGES)
        if failure.final:
            self.doom(group, sample, _FINAL.get(failure.stage, "failed"))
        if sample.failing:
            self.failing[group.number, failure.sample] = None

    # indexes

    def doom(self, group: Group, sample: Sample, reason: str) -> None:
        """No score can save the group: it must be dropped as `reason`."""
        sample.final = sample.final or reason
        self.doomed.setdefault(group.number, sample.final)

    def _look_for_surplus(self, group: Group, index: int) -> None:
        sample = group.samples[index]
        if group.task is None or sample is None or sample.scored is None:
            return
        if sample.scored.task_sequence != sample.task_sequence and sample.cancelled < sample.task_sequence:
            self.surplus[group.number, index] = None

    def _index_score(self, group: Group, sample: Sample) -> None:
        if group.is_train and sample.scored is not None:
            for version in sample.scored.versions:
                self.by_version.setdefault(version, {})[group.number] = None

    def _index_complete(self, group: Group) -> None:
        self.complete[group.number] = None
        if group.flat:
            self.flat[group.number] = None

    def enter(self, group: Group) -> None:
        """The group is open (again): into every index that its facts put it in."""
        heapq.heappush(self._deadlines, (group.deadline, group.number))
        if group.is_train:
            self.open_train[group.number] = None
            if group.complete:
                self._index_complete(group)
        elif group.version is not None:
            self.open_eval.setdefault(group.version, {})[group.number] = None
            if group.complete:
                self.eval_scores[group.version] = self.eval_scores.get(group.version, 0) + 1
        for index, sample in enumerate(group.samples):
            if sample is None:
                continue
            self._index_score(group, sample)
            if sample.final is not None:
                self.doomed.setdefault(group.number, sample.final)
            if sample.failing:
                self.failing[group.number, index] = None
            self._look_for_surplus(group, index)
            waits = group.is_train and sample.scored is None and sample.task_sequence < self.fork_sequence
            if waits and sample.not_before_depth > self.fork_depth:
                self.stranded[group.number, index] = None

    def _leave(self, group: Group) -> None:
        """The group isn't open any more: out of every index."""
        number = group.number
        self.open_train.pop(number, None)
        self.complete.pop(number, None)
        self.flat.pop(number, None)
        self.doomed.pop(number, None)
        if group.version is not None:
            self.open_eval.get(group.version, {}).pop(number, None)
            if group.complete:
                self.eval_scores[group.version] -= 1
                if not self.eval_scores[group.version]:
                    del self.eval_scores[group.version]
        for version in group.versions() if group.is_train else ():
            holders = self.by_version.get(version, {})
            holders.pop(number, None)
            if not holders:
                self.by_version.pop(version, None)
        for index in range(group.size):
            for keyed in (self.failing, self.stranded, self.surplus, self.lost):
                keyed.pop((number, index), None)

    def overdue(self, now: float) -> list[int]:
        """Open groups that lack a score at their deadline."""
        found: dict[int, None] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            number = heapq.heappop(self._deadlines)[1]
            group = self.groups.get(number)
            if group is not None and group.batch is None and not group.complete:
                found[number] = None
        for number in found:  # they stay listed until they are dropped
            heapq.heappush(self._deadlines, (self.groups[number].deadline, number))
        return list(found)

    def waiting_groups(self, depth: int) -> int:
        """Train groups that are admitted and not yet consumed in a lineage of this depth: open, or in a batch at or above it."""
        batched = sum(len(self.batches[d].groups) for d in range(depth, self.next_depth) if d in self.batches)
        return len(self.open_train) + batched
