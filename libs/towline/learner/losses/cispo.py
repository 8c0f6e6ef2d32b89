"""CISPO: the importance weight is clipped and no gradient flows through it, so that no token's gradient is dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from towline.learner.losses.base import LossInputs, LossTerms, log_ratio, token_mean


@dataclass(frozen=True, slots=True)
class CISPO:
    """L = -mean_t sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A log pi(t).

    MiniMax 2025 (MiniMax-M1, arXiv:2506.13585), eq. 4. As there, nothing bounds the weight below (clip_low 1); the upper bound of
    5 is ScaleRL's (Khatri et al. 2025, arXiv:2510.13786).
    """

    clip_low: float = 1.0
    clip_high: float = 4.0
    needs_proximal: ClassVar[bool] = False

    def row_weights(self, lengths: Tensor, rows: float) -> Tensor:
        return token_mean(lengths)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        with torch.no_grad():
            ratio = log_ratio(inputs.logprobs, inputs.old).exp()
            weight = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        values = -weight * inputs.advantages * inputs.logprobs
        return LossTerms(values, ratio < 1.0 - self.clip_low, ratio > 1.0 + self.clip_high)
