"""From a batch record and its rows' bytes to rows that a learner can train on: checked against the digests, decoded, weighed.

Pure, and the one place that says it: the trainer computes with it, and a replay that must give the same bits does too. What the
learner is given is byte for byte what the engine sampled. A row that can't be had, or isn't what the record says, is a named gap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from towline.config import Settings
from towline.contract.codec import digest
from towline.contract.control import BatchRecord, BatchRow, OverStale
from towline.contract.task import VersionSpan
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
    masked_rows: int = 0
    """Rows that aren't among `rows` since all of their tokens are over the bound and masked. They aren't missing: their rewards
    count for their groups."""
    masked_tokens: int = 0
    """Policy tokens without a gradient, in those and in `rows`."""
    kept_tokens: int = 0
    """Policy tokens over the bound that are trained."""

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
    over_stale: Literal["mask", "keep"] | None = None
    """What a batch record may say of rows over the bound; None: there must be none."""

    @classmethod
    def of(cls, settings: Settings) -> Bound:
        buffer = settings.buffer
        modes: dict[str, Literal["mask", "keep"]] = {"mask_stale_tokens": "mask", "keep": "keep"}
        return cls(buffer.max_staleness, buffer.off_line == "keep" and buffer.max_staleness > 0, modes.get(buffer.over_stale))


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
    """The batch's rows, in the record's order. `InvariantError` where one is staler than the run and the record allow, where the
    record's word about tokens over the bound isn't what the row holds, or where one is off the line."""
    over = _over_stale(record, bound)
    rewards = np.array([row.reward for row in record.rows], np.float64)
    groups = np.array([row.group for row in record.rows], np.int64)
    # A missing row's reward still counts for its group: it is known, and the mean would be biased without it.
    advantages = by_group(advantage, groups, rewards)
    rows: list[Row] = []
    gaps: list[Gap] = []
    masked_rows = masked_tokens = kept_tokens = 0
    for place, (row, found, value) in enumerate(zip(record.rows, opened, advantages, strict=True)):
        if isinstance(found, Gap):
            gaps.append(found)
            continue
        try:
            stale = _stale_spans(record, row, found, lineage, bound, over.get(place, 0))
            masked = stale if bound.over_stale == "mask" else []
            if len(masked) == len(found.version_spans):
                masked_rows += 1
                masked_tokens += over[place]
                continue
            made = _row(record, row, found, float(value), lineage, bound, masked)
            check_row(made, vocabulary)
        except (MalformedError, MissingError) as error:
            gaps.append(Gap(row, "malformed", error.message))
        else:
            rows.append(made)
            masked_tokens += over.get(place, 0) if masked else 0
            kept_tokens += 0 if masked else over.get(place, 0)
    mean = float(rewards.mean()) if rewards.size else 0.0
    return Gathered(rows, gaps, mean, masked_rows, masked_tokens, kept_tokens)


def _over_stale(record: BatchRecord, bound: Bound) -> dict[int, int]:
    """Place of each row over the bound -> its tokens over it, as the record says; `InvariantError` where the run allows none."""
    said = record.over_stale
    if not isinstance(said, OverStale):
        return {}
    if said.mode != bound.over_stale or said.max_staleness > bound.max_staleness:
        raise InvariantError(
            f"the batch for depth {record.for_depth} has rows over the bound of {said.max_staleness} to {said.mode}; "
            "buffer.over_stale and buffer.max_staleness say otherwise",
            code="over_stale",
        )
    return {item.row: item.tokens for item in said.rows}


def _stale_spans(
    record: BatchRecord, row: BatchRow, trajectory: Trajectory, lineage: Lineage, bound: Bound, said: int
) -> list[VersionSpan]:
    """The spans over the bound that the record was judged by. `InvariantError` unless they hold `said` tokens."""
    most = bound.max_staleness
    if isinstance(record.over_stale, OverStale):
        most = record.over_stale.max_staleness
    depths = [_depth(lineage, span.version, bound) for span in trajectory.version_spans]
    stale = [span for span, depth in zip(trajectory.version_spans, depths, strict=True) if record.for_depth - depth > most]
    tokens = sum(span.end - span.start for span in stale)
    if tokens != said:
        told = f", and the record says {said} tokens over it where there are {tokens}" if said else ""
        raise InvariantError(
            f"row {row.group}.{row.sample} of the batch for depth {record.for_depth} has the depth {min(depths)}: staleness "
            f"{record.for_depth - min(depths)} is over {most}{told}",
            code="staleness",
        )
    return stale


def _row(
    record: BatchRecord,
    row: BatchRow,
    trajectory: Trajectory,
    advantage: float,
    lineage: Lineage,
    bound: Bound,
    masked: list[VersionSpan],
) -> Row:
    """The tokens of `masked` spans have no gradient: for the learner the policy didn't choose them."""
    trained = [span for span in trajectory.version_spans if span not in masked]
    versions = np.full(trajectory.tokens.size, -1, np.int32)
    for span in trained:
        versions[span.start : span.end] = span.version
    loss_mask = trajectory.loss_mask
    if masked:
        loss_mask = loss_mask.copy()
        for span in masked:
            loss_mask[span.start : span.end] = 0
    return Row(
        group=row.group,
        sample=row.sample,
        tokens=trajectory.tokens,
        loss_mask=loss_mask,
        logprobs=trajectory.logprobs,
        versions=versions,
        temperature=trajectory.sampling.temperature,
        advantage=advantage,
        staleness=record.for_depth - min(_depth(lineage, span.version, bound) for span in trained),
    )


def _depth(lineage: Lineage, version: int, bound: Bound) -> int:
    """`MissingError` where the LOG has no such version."""
    if not bound.keep_off_line and not lineage.on_line(version):
        raise InvariantError(f"version {version} is off the line, and buffer.off_line drops such samples", code="off_line")
    return lineage.effective_depth(version)
