"""Decoupled PPO: what is clipped is the step away from the proximal policy; the behaviour policy only weighs the samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from towline.learner.losses.base import LossInputs, LossTerms, clipped_surrogate, log_ratio, token_mean


@dataclass(frozen=True, slots=True)
class DecoupledPPO:
    """L = -mean_t w_t min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A), r_t = pi / pi_prox, w_t = sg(pi_prox / pi_behaviour).

    Hilton et al. 2022 (arXiv:2110.00641), eq. 2; for asynchronous RL: Fu et al. 2025 (AReaL, arXiv:2505.24298), eq. 5. pi_prox is
    the trainer's policy before the batch's first optimiser step. `weight_cap` None leaves w_t unbounded.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    weight_cap: float | None = 5.0
    needs_proximal: ClassVar[bool] = True

    def row_weights(self, lengths: Tensor, rows: float) -> Tensor:
        return token_mean(lengths)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        ratio = log_ratio(inputs.logprobs, inputs.old).exp()
        terms = clipped_surrogate(ratio, inputs.advantages, self.clip_low, self.clip_high)
        with torch.no_grad():
            weight = log_ratio(inputs.old, inputs.behaviour).exp().clamp(max=self.weight_cap)
        return LossTerms(weight * terms.values, terms.clipped_low, terms.clipped_high)
