"""Truncated importance sampling: weigh each token by how much likelier the trainer finds it, up to a cap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from towline.learner.losses.base import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class TruncatedImportanceSampling:
    """w_t = min(pi_prox(t) / pi_behaviour(t), cap).

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; the truncation is Ionides 2008.
    """

    cap: float = 2.0
    needs_proximal: ClassVar[bool] = True

    def __call__(self, log_ratio: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
        return log_ratio.clamp(max=MAX_LOG_RATIO).exp().clamp(max=self.cap)
