"""Token masks: a token on which engine and trainer disagree too much isn't trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from towline.learner.losses.base import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class IcePop:
    """w_t = k if low <= k <= high else 0, with k = pi_prox(t) / pi_behaviour(t).

    Ling team 2025 (Ring-1T, arXiv:2510.18855), section on IcePop; the bounds are theirs.
    """

    low: float = 0.5
    high: float = 5.0
    needs_proximal: ClassVar[bool] = True

    def __call__(self, log_ratio: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
        ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0)


@dataclass(frozen=True, slots=True)
class TokenMask:
    """w_t = 1 if low <= pi_prox(t) / pi_behaviour(t) <= high else 0: IcePop's mask without its weight."""

    low: float = 0.5
    high: float = 5.0
    needs_proximal: ClassVar[bool] = True

    def __call__(self, log_ratio: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
        ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
        return ((ratio >= self.low) & (ratio <= self.high)).to(log_ratio.dtype)
