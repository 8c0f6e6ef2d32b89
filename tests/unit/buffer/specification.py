"""What must hold of CONTROL, OUTCOME and LOG together, said plainly and computed from their bytes, each time from the start.

It knows nothing of the buffer's state: only the auditor's reading of the LOG and of CONTROL, which shares no code with it.
"""

from __future__ import annotations

from towline.audit.ledger import Ledger
from towline.audit.line import Line
from towline.contract import control
from towline.contract.entries import LogEntry
from towline.contract.groups import EXTERNAL
from towline.contract.outcome import Failure, Score, decode_outcome
from towline.contract.task import TRAIN, Task
from unit.buffer.world import World

Key = tuple[int, int]


class Specification:
    """The world as it stands, read anew."""

    def __init__(self, world: World) -> None:
        self.rules = world.rules
        self.records = world.records()
        self.line = Line(world.log)
        self.log: list[LogEntry] = world.log
        self.ledger = Ledger()
        self.tasks: dict[Key, list[tuple[int, Task]]] = {}
        for sequence, record in enumerate(self.records, start=1):
            self.ledger.read(record, sequence)
            if isinstance(record, control.TaskRecord | control.ReissueRecord):
                self.tasks.setdefault((record.task.group, record.task.sample), []).append((sequence, record.task))
        self.scores: dict[Key, Score] = {}
        self.failures: dict[Key, list[Failure]] = {}
        external_sizes: dict[int, int] = {}
        for data in world.outcomes[: world.applied_outcomes]:
            outcome = decode_outcome(data)
            key = (outcome.group, outcome.sample)
            if isinstance(outcome, Score):
                if outcome.group < 0:  # the first score that can be one says how many samples the group has
                    size = external_sizes.get(outcome.group)
                    if not 0 <= outcome.sample < (outcome.group_size if size is None else size):
                        continue
                    if external_sizes.setdefault(outcome.group, outcome.group_size) != outcome.group_size:
                        continue
                self.scores.setdefault(key, outcome)
            elif key not in self.scores:
                self.failures.setdefault(key, []).append(outcome)

    @property
    def depth(self) -> int:
        return self.line.depths[self.line.latest or 0]

    def standing_groups(self) -> dict[int, tuple[int, int]]:
        """Group -> (epoch, for_depth) of its batch, where no fork has voided it."""
        return {
            row.group: (batch.record.epoch, batch.record.for_depth)
            for batch in self.ledger.batches
            if not batch.void
            for row in batch.record.rows
        }

    def open_groups(self, lane: str) -> list[int]:
        standing = self.standing_groups()
        return [
            number
            for number, group in self.ledger.groups.items()
            if group.lane == lane and group.fate is None and number not in standing
        ]

    def check_records(self) -> None:
        """No record contradicts the ones before it, and the counts add up."""
        counts = self.ledger.close(self.line.consumed())
        assert self.ledger.violations == [], [str(violation) for violation in self.ledger.violations]
        assert counts.balanced

    def check_batch(self, batch: control.BatchRecord) -> None:
        """The batch, just appended: whole groups, first scores, within the bound."""
        assert batch.epoch == max(self.line.heads)
        assert self.depth <= batch.for_depth < self.rules.steps
        assert len({row.group for row in batch.rows}) == self.rules.groups_per_batch
        mode = {"mask_stale_tokens": "mask", "keep": "keep"}.get(self.rules.over_stale)
        said: dict[int, int] = {}
        if isinstance(batch.over_stale, control.OverStale):
            assert (batch.over_stale.mode, batch.over_stale.max_staleness) == (mode, self.rules.max_staleness)
            said = {item.row: item.tokens for item in batch.over_stale.rows}
            assert 0 not in said.values()
        left: dict[int, int] = {}
        for place, row in enumerate(batch.rows):
            score = self.scores[row.group, row.sample]
            assert (row.sequence, row.digest, row.reward) == (
                score.trajectory_sequence, score.trajectory_digest, score.reward,
            )  # fmt: skip
            judged = [self._judge(span.version) for span in score.version_spans]
            assert row.least_depth == min(depth for depth, _ in judged)
            assert batch.for_depth - row.least_depth >= 0
            assert self.rules.keep_off_line or all(on_line for _, on_line in judged)
            least = batch.for_depth - self.rules.max_staleness
            over = sum(span.end - span.start for span in score.version_spans if self._judge(span.version)[0] < least)
            assert said.pop(place, 0) == over
            left[row.group] = left.get(row.group, 0) + score.policy_tokens - over
        assert not said
        assert self.rules.over_stale != "mask_stale_tokens" or all(left.values()), "a group with nothing left was batched"

    def _judge(self, version: int) -> tuple[int, bool]:
        line = self.line.ancestors(self.line.latest or 0)
        return next((self.line.depths[step], step == version) for step in self.line.ancestors(version) if step in line)

    def check_pacing(self) -> None:
        """After an admission: what isn't consumed fits into the batches that the bound and the run leave."""
        consumed = {(epoch, depth) for depth, epoch in enumerate(self.line.consumed())}
        waiting = [name for name in self.standing_groups().values() if name not in consumed]
        ahead = min(1 + self.rules.max_staleness, self.rules.steps - self.depth)
        still_open = self.open_groups(TRAIN) + self.open_groups(EXTERNAL)
        assert len(waiting) + len(still_open) <= ahead * self.rules.groups_per_batch
        assert len(still_open) <= self.rules.max_open_groups

    def check_rest(self, now: float) -> None:
        """When there is nothing to decide: nobody waits for what won't come."""
        open_train = [*self.open_groups(TRAIN), *self.open_groups(EXTERNAL)]
        sizes = {number: self.ledger.groups[number].size for number in open_train}
        complete = [number for number in open_train if all((number, i) in self.scores for i in range(sizes[number]))]
        assert set(self.open_groups(EXTERNAL)) <= set(complete), "an external group is admitted whole"
        batched = [batch.record.for_depth for batch in self.ledger.batches if not batch.void]
        next_depth = max(batched, default=-1) + 1
        tail = self.rules.tail_wait_seconds
        waits_for_tail = any(
            number not in complete
            and self.tasks[number, 0][0][1].admitted_at + tail > now
            and any((number, i) in self.scores for i in range(sizes[number]))
            for number in open_train
        )
        if self.line.heads and next_depth < self.rules.steps and self.depth < self.rules.steps and not waits_for_tail:
            assert len(complete) < self.rules.groups_per_batch
        for number in [*open_train, *self.open_groups("eval")]:
            group = self.ledger.groups[number]
            for sample in range(group.size if number >= 0 else 0):
                self._check_sample((number, sample), now, whole=number in complete)

    def _check_sample(self, key: Key, now: float, *, whole: bool) -> None:
        failures = self.failures.get(key, [])
        assert not any(failure.final for failure in failures)
        sequence, task = self.tasks[key][-1]
        if key not in self.scores:
            assert not any(failure.task_sequence == sequence for failure in failures), "a failed sample wasn't issued again"
            assert task.deadline > now
            counted = {
                (failure.task_sequence, failure.delivery, failure.stage)
                for failure in failures
                if failure.stage not in ("not_ready", "version_moved")
            }
            assert len(counted) < self.rules.max_attempts or not any(f.task_sequence == sequence for f in failures)
            assert task.not_before_depth <= self.depth
        elif whole or task.lane == TRAIN:
            for span in self.scores[key].version_spans:
                assert span.version in self.line.parents
