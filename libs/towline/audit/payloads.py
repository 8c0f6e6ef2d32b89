"""Whether a batch's or an evaluation's row is what was sampled and scored: bytes, digest, spans, reward, staleness."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from towline.audit.ledger import Ledger, SampleKey
from towline.audit.line import Line
from towline.audit.report import Violation
from towline.contract.codec import digest
from towline.contract.control import OverStale
from towline.contract.groups import EXTERNAL, is_external
from towline.contract.outcome import Score
from towline.contract.trajectory import Trajectory, decode_trajectory
from towline.errors import MalformedError


@dataclass(frozen=True, slots=True)
class Row:
    """A row to check. `epoch` and `for_depth` are None for an evaluation's, `version` for a batch's."""

    group: int
    sample: int
    sequence: int
    digest: bytes
    reward: float
    epoch: int | None
    for_depth: int | None
    least_depth: int | None
    version: int | None
    over_stale: OverStale | None = None
    """What its batch's record says of rows over the bound."""
    over_tokens: int = 0
    """Its tokens over the bound, as that says."""

    @property
    def where(self) -> str:
        return f"{self.group}.{self.sample}"


@dataclass(frozen=True, slots=True)
class Bound:
    """What the run promised."""

    run: str
    max_staleness: int
    keep_off_line: bool
    over_stale: Literal["mask", "keep"] | None = None
    """How rows over the bound may be trained; None: not at all."""


def rows_of(ledger: Ledger) -> list[Row]:
    """Every row that counts: of the evaluations and of the batches that no fork has voided."""
    rows: list[Row] = []
    for batch in ledger.batches:
        record = batch.record
        said = record.over_stale if isinstance(record.over_stale, OverStale) else None
        over = {item.row: item.tokens for item in said.rows} if said is not None else {}
        for place, row in enumerate(record.rows if not batch.void else ()):
            rows.append(
                Row(
                    row.group,
                    row.sample,
                    row.sequence,
                    row.digest,
                    row.reward,
                    record.epoch,
                    record.for_depth,
                    row.least_depth,
                    None,
                    said,
                    over.get(place, 0),
                )
            )
    for closed in ledger.evals:
        rows.extend(
            Row(row.group, row.sample, row.sequence, row.digest, row.reward, None, None, None, closed.version)
            for row in closed.rows
        )
    return rows


@dataclass(slots=True)
class Checker:
    """Compares rows with their trajectories and scores, and collects what differs."""

    bound: Bound
    ledger: Ledger
    line: Line
    scores: dict[SampleKey, Score]
    """The first score of each sample, in OUTCOME's order."""
    scores_whole: bool = True
    """Whether `scores` has all that were ever given; False where OUTCOME's beginning was purged."""
    violations: list[Violation] = field(default_factory=list)
    staleness_max: int = 0
    over_rows: int = 0
    over_tokens: int = 0
    over_most: int = 0
    _judged: dict[tuple[int, int], tuple[int, bool]] = field(default_factory=dict)

    def check(self, row: Row, data: bytes | None) -> None:
        """`data` is what stands at the row's sequence of TRAJECTORY; None where nothing does."""
        self._check_score(row)
        if data is None:
            self._fault(6, row, f"TRAJECTORY has no message {row.sequence}")
        elif digest(data) != row.digest:
            self._fault(6, row, f"the bytes at TRAJECTORY {row.sequence} have digest {digest(data).hex()}, the row says "
                                f"{row.digest.hex()}")  # fmt: skip
        else:
            try:
                trajectory = decode_trajectory(data)
            except MalformedError as error:
                self._fault(6, row, f"the trajectory at {row.sequence} can't be read: {error.message}")
                return
            self._check_trajectory(row, trajectory)

    def _fault(self, invariant: int, row: Row, what: str) -> None:
        self.violations.append(Violation(invariant, row.where, what))

    def _check_score(self, row: Row) -> None:
        score = self.scores.get((row.group, row.sample))
        if score is None:
            if self.scores_whole:
                self._fault(6, row, "it has no score in OUTCOME")
        elif (score.trajectory_sequence, score.trajectory_digest) != (row.sequence, row.digest):
            self._fault(6, row, f"its score is of TRAJECTORY {score.trajectory_sequence}, the row names {row.sequence}")
        elif score.reward != row.reward:
            self._fault(6, row, f"its reward is {row.reward}, its score {score.reward}")

    def _check_trajectory(self, row: Row, trajectory: Trajectory) -> None:
        if (trajectory.run, trajectory.group, trajectory.sample) != (self.bound.run, row.group, row.sample):
            self._fault(6, row, f"the trajectory at {row.sequence} is of {trajectory.run} {trajectory.group}.{trajectory.sample}")
        purged = trajectory.task_sequence < self.ledger.begins_at
        if is_external(row.group):
            self._check_external(row, trajectory)
        elif not purged and self.ledger.task_sequences.get(trajectory.task_sequence) != (row.group, row.sample):
            self._fault(6, row, f"generated for CONTROL {trajectory.task_sequence}, which is no task of it")
        versions = {span.version for span in trajectory.version_spans}
        unknown = sorted(versions - self.line.parents.keys())
        if unknown:
            self._fault(3, row, f"sampled by version {unknown[0]}, which the LOG hasn't")
        elif row.version is not None:
            if versions != {row.version}:
                self._fault(3, row, f"evaluated for version {row.version}, sampled by {sorted(versions)}")
        elif row.epoch not in self.line.heads:
            self._fault(2, row, f"in a batch of epoch {row.epoch}, which the LOG hasn't")
        else:
            self._check_staleness(row, versions, trajectory)

    def _check_external(self, row: Row, trajectory: Trajectory) -> None:
        group = self.ledger.groups.get(row.group)
        if trajectory.lane != EXTERNAL or trajectory.task_sequence != 0:
            self._fault(6, row, f"an external sample of lane {trajectory.lane}, for CONTROL {trajectory.task_sequence}")
        if group is not None and trajectory.group_size != group.size:
            self._fault(6, row, f"admitted as one of {group.size}, sampled as one of {trajectory.group_size}")

    def _check_staleness(self, row: Row, versions: set[int], trajectory: Trajectory) -> None:
        assert row.epoch is not None
        assert row.for_depth is not None
        assert row.least_depth is not None
        judged = {version: self._judge(version, row.epoch) for version in versions}
        least = min(depth for depth, _ in judged.values())
        greatest = max(depth for depth, _ in judged.values())
        batch = f"batch {row.epoch}/{row.for_depth}"
        most = self.bound.max_staleness if row.over_stale is None else min(row.over_stale.max_staleness, self.bound.max_staleness)
        tokens = sum(span.end - span.start for span in trajectory.version_spans if row.for_depth - judged[span.version][0] > most)
        if row.over_tokens:
            self.over_rows += 1
            self.over_tokens += row.over_tokens
            self.over_most = max(self.over_most, row.for_depth - least)
        else:
            self.staleness_max = max(self.staleness_max, row.for_depth - least)
        if row.over_stale is not None and row.over_stale.mode != self.bound.over_stale:
            self._fault(3, row, f"{batch} says to {row.over_stale.mode} what is over the bound, buffer.over_stale doesn't")
        if tokens and not row.over_tokens:
            self._fault(3, row, f"in {batch} with tokens of depth {least}: staleness {row.for_depth - least} is over {most}")
        elif tokens != row.over_tokens:
            self._fault(3, row, f"{batch} says {row.over_tokens} of its tokens are over the bound, {tokens} are")
        if greatest > row.for_depth:
            self._fault(3, row, f"in {batch} with tokens of depth {greatest}, which had consumed that batch already")
        if row.least_depth > least:
            self._fault(3, row, f"{batch} says least depth {row.least_depth}, its tokens have {least}")
        for version, (_, on_line) in judged.items():
            if not on_line and not self.bound.keep_off_line:
                self._fault(3, row, f"in {batch} with tokens of version {version}, which is off the line")

    def _judge(self, version: int, epoch: int) -> tuple[int, bool]:
        key = (version, epoch)
        if key not in self._judged:
            self._judged[key] = self.line.judged(version, epoch)
        return self._judged[key]
