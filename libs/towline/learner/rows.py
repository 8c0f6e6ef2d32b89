"""From a batch record and its rows' bytes to rows that a learner can train on: checked against the digests, decoded, weighed.

Pure, and the one place that says it: the trainer computes with it, and a replay that must give the same bits does too. What the
learner is given is byte for byte what the engine sampled. A row that can't be had, or isn't what the record says, is a named gap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from towline.config import Settings
from towline.contract.codec import digest
from towline.contract.control import BatchRecord, BatchRow
from towline.contract.trajectory import Trajectory, decode_trajectory
from towline.errors import InvariantError, MalformedError, MissingError
from towline.learner.advantages.base import Advantage, by_group
from towline.learner.base import Row, check_row
from towline.store.lineage import Lineage


@dataclass(frozen=True, slots=True)
class Gap:
    """A row that can't be trained on. `reason`: lost, corrupt, digest or malformed."""

    row: BatchRow
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Gathered:
    """A batch's rows as far as they could be had."""

    rows: list[Row]
    gaps: list[Gap]
    reward_mean: float
    """Over all rows of the record."""

    @property
    def missing(self) -> dict[str, int]:
        """Gaps by reason."""
        return dict(Counter(gap.reason for gap in self.gaps))

    @property
    def missing_rows(self) -> int:
        return len(self.gaps)


@dataclass(frozen=True, slots=True)
class Bound:
    """What a run asks of its rows' versions."""

    max_staleness: int
    keep_off_line: bool
    """A version off the line counts from the common ancestor; else such a row breaks an invariant."""

    @classmethod
    def of(cls, settings: Settings) -> Bound:
        buffer = settings.buffer
        return cls(buffer.max_staleness, buffer.off_line == "keep" and buffer.max_staleness > 0)


def open_row(row: BatchRow, payload: bytes | str) -> Trajectory | Gap:
    """The row's trajectory from its bytes; a payload that is text is the reason why there are none."""
    if isinstance(payload, str):
        return Gap(row, payload)
    if digest(payload) != row.digest:
        return Gap(row, "digest")
    try:
        trajectory = decode_trajectory(payload)
    except MalformedError as error:
        return Gap(row, "malformed", error.message)
    if (trajectory.group, trajectory.sample) != (row.group, row.sample):
        return Gap(row, "malformed", f"the trajectory is {trajectory.group}.{trajectory.sample}")
    return trajectory


def assemble(
    record: BatchRecord,
    opened: Sequence[Trajectory | Gap],
    *,
    advantage: Advantage,
    vocabulary: int,
    lineage: Lineage,
    bound: Bound,
) -> Gathered:
    """The batch's rows, in the record's order. `InvariantError` where one is staler than the run allows, or off the line."""
    rewards = np.array([row.reward for row in record.rows], np.float64)
    groups = np.array([row.group for row in record.rows], np.int64)
    # A missing row's reward still counts for its group: it is known, and the mean would be biased without it.
    advantages = by_group(advantage, groups, rewards)
    rows: list[Row] = []
    gaps: list[Gap] = []
    for row, found, value in zip(record.rows, opened, advantages, strict=True):
        if isinstance(found, Gap):
            gaps.append(found)
            continue
        try:
            made = _row(record, row, found, float(value), lineage, bound)
            check_row(made, vocabulary)
        except (MalformedError, MissingError) as error:
            gaps.append(Gap(row, "malformed", error.message))
        else:
            rows.append(made)
    return Gathered(rows, gaps, float(rewards.mean()) if rewards.size else 0.0)


def _row(record: BatchRecord, row: BatchRow, trajectory: Trajectory, advantage: float, lineage: Lineage, bound: Bound) -> Row:
    least = min(_depth(lineage, span.version, bound) for span in trajectory.version_spans)
    staleness = record.for_depth - least
    if staleness > bound.max_staleness:
        raise InvariantError(
            f"row {row.group}.{row.sample} of the batch for depth {record.for_depth} has the depth {least}: staleness "
            f"{staleness} is over {bound.max_staleness}",
            code="staleness",
        )
    versions = np.full(trajectory.tokens.size, -1, np.int32)
    for span in trajectory.version_spans:
        versions[span.start : span.end] = span.version
    return Row(
        group=row.group,
        sample=row.sample,
        tokens=trajectory.tokens,
        loss_mask=trajectory.loss_mask,
        logprobs=trajectory.logprobs,
        versions=versions,
        temperature=trajectory.sampling.temperature,
        advantage=advantage,
        staleness=staleness,
    )


def _depth(lineage: Lineage, version: int, bound: Bound) -> int:
    """`MissingError` where the LOG has no such version."""
    if not bound.keep_off_line and not lineage.on_line(version):
        raise InvariantError(f"version {version} is off the line, and buffer.off_line drops such samples", code="off_line")
    return lineage.effective_depth(version)
