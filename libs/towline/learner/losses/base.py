"""What a policy loss is: a value per policy token and a weight per row, so that micro batches add up to the global mean.

Everything is packed: N policy tokens of R rows in one dimension, `rows` says whose each is. There is no padding to mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp of more would only overflow: a ratio of e^20 is far outside every clip range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Of a micro batch of R rows with N policy tokens."""

    logprobs: Tensor
    """f32[N] under the policy in training; the gradient flows through it."""
    old: Tensor
    """f32[N] the denominator of the ratio: the behaviour policy, or the proximal one where loss or correction ask for it."""
    behaviour: Tensor
    """f32[N] as the engine sampled."""
    advantages: Tensor
    """f32[N], the row's at each of its tokens."""
    rows: Tensor
    """i64[N] in [0, R)"""
    lengths: Tensor
    """f32[R] policy tokens of each row."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """f32[N] values to minimise, and bool[N] where a bound below or above stops the gradient."""

    values: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


class Loss(Protocol):
    """`needs_proximal`: `old` must be the policy before the batch's first optimiser step, recomputed by the trainer."""

    needs_proximal: ClassVar[bool]

    def row_weights(self, lengths: Tensor, rows: float) -> Tensor:
        """f32[R]: the loss of a minibatch is sum over rows of weight x sum over the row's tokens of value.

        `lengths` f32[R] are the minibatch's rows; `rows` counts also the rows without a signal that were left out of it.
        """
        ...

    def __call__(self, inputs: LossInputs) -> LossTerms: ...


def token_mean(lengths: Tensor) -> Tensor:
    """Every token of the minibatch counts the same: 1 / (tokens of the minibatch)."""
    return torch.full_like(lengths, 1.0) / lengths.sum()


def sequence_mean(lengths: Tensor, rows: float) -> Tensor:
    """Every row counts the same, and every token within it: 1 / (rows x the row's tokens)."""
    return 1.0 / (lengths * rows)


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """new - old, bounded so that its exp is finite; NaN stays NaN."""
    return (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def row_means(values: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    """f32[R]: each row's mean over its tokens."""
    return torch.zeros_like(lengths).index_add(0, rows, values) / lengths


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> LossTerms:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A): PPO's bound (Schulman et al. 2017, arXiv:1707.06347, eq. 7)."""
    values = -torch.minimum(ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages)
    with torch.no_grad():
        below = (ratio < 1.0 - low) & (advantages < 0)
        above = (ratio > 1.0 + high) & (advantages > 0)
    return LossTerms(values, below, above)
