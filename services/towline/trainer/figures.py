"""What the trainer tells about itself: the status figures, and the same as Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from towline.contract.entries import VersionEntry
from towline.learner.base import StepReport


@dataclass(slots=True)
class Figures:
    """Seconds and counts are totals of this process; the rest is the last step's or the last version's."""

    step: int = 0
    depth: int = 0
    epoch: int = -1
    loss: float = 0.0
    reward_mean: float = 0.0
    learning_rate: float = 0.0
    gradient_norm: float = 0.0
    clip_low: float = 0.0
    clip_high: float = 0.0
    mismatch_kl: float = 0.0
    logprob_abs_diff: float = 0.0
    effective_sample_share: float = 0.0
    mismatch_kl_by_staleness: dict[int, float] = field(default_factory=dict)
    ratio_by_staleness: dict[int, float] = field(default_factory=dict)
    batches: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    skipped_batches: int = 0
    skip_reasons: dict[str, int] = field(default_factory=dict)
    """Reason -> optimiser steps (batches for no_rows and no_signal)."""
    padding_share: float = 0.0
    missing_rows: int = 0
    idle_seconds: float = 0.0
    """Waiting for a batch or, in sync mode, for a commit."""
    train_seconds: float = 0.0
    snapshot_seconds: float = 0.0
    """Training stood still to take copies of what is published, and of the checkpoints."""
    encode_seconds: float = 0.0
    upload_seconds: float = 0.0
    commit_seconds: float = 0.0
    """From the snapshot to the entry."""
    versions: int = 0
    checkpoints: int = 0
    wire_bytes: int = 0
    density: float = 0.0
    density_sum: float = 0.0
    model_bytes: int = 0

    def trained(self, report: StepReport, *, step: int, reward_mean: float, missing_rows: int, seconds: float) -> None:
        """A batch was consumed."""
        self.step, self.reward_mean = step, reward_mean
        self.loss, self.learning_rate, self.gradient_norm = report.loss, report.learning_rate, report.gradient_norm
        self.clip_low, self.clip_high = report.clip_low, report.clip_high
        self.mismatch_kl, self.logprob_abs_diff = report.mismatch_kl, report.logprob_abs_diff
        self.effective_sample_share = report.effective_sample_share
        self.mismatch_kl_by_staleness = dict(report.mismatch_kl_by_staleness)
        self.ratio_by_staleness = dict(report.ratio_by_staleness)
        self.batches += 1
        self.tokens += report.tokens
        self.skipped_steps += report.skipped_steps
        self.skipped_batches += not report.trained
        self.skip_reasons = dict(Counter(self.skip_reasons) + Counter(report.skip_reasons))
        self.padding_share = report.padding_share
        self.missing_rows += missing_rows
        self.train_seconds += seconds

    def committed(self, entry: VersionEntry, seconds: float) -> None:
        """A version stands in the LOG."""
        self.depth = entry.depth
        self.versions += 1
        self.checkpoints += entry.checkpoint is not None
        self.wire_bytes += entry.wire_bytes
        self.density, self.model_bytes = entry.density, entry.model_bytes
        self.density_sum += entry.density
        self.encode_seconds += entry.encode_seconds
        self.upload_seconds += entry.upload_seconds
        self.commit_seconds += seconds

    def plain(self) -> dict[str, Any]:
        return asdict(self)
