"""Sequence mask: a sample that the trainer's policy wouldn't have produced isn't trained on at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from towline.learner.losses.base import row_means


@dataclass(frozen=True, slots=True)
class SequenceMask:
    """w_t = 1 for every token of a sample if low <= exp(mean_t log(pi_prox / pi_behaviour)) <= high, else 0.

    Liu et al. 2025, "When Speed Kills Stability" (masked importance sampling per sequence), with the geometric mean instead of
    the product, so that the bounds don't depend on the length.
    """

    low: float = 0.5
    high: float = 2.0
    needs_proximal: ClassVar[bool] = True

    def __call__(self, log_ratio: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
        ratio = row_means(log_ratio, rows, lengths).exp()
        return ((ratio >= self.low) & (ratio <= self.high)).to(log_ratio.dtype)[rows]
