"""PPO-clip: the symmetric clipped ratio, with the dual clip that bounds what a very unlikely bad token can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from towline.learner.losses.base import LossInputs, LossTerms, clipped_surrogate, log_ratio, token_mean


@dataclass(frozen=True, slots=True)
class PPOClip:
    """L = mean_t max(-r_t A, -clip(r_t, 1 - clip, 1 + clip) A), and where A < 0 at most -dual_clip A.

    Schulman et al. 2017 (arXiv:1707.06347), eq. 7; dual clip: Ye et al. 2020 (arXiv:1912.09729), eq. 5. `dual_clip` None is off.
    """

    clip: float = 0.2
    dual_clip: float | None = None
    needs_proximal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1.0 + self.clip:
            raise ValueError(f"dual_clip must be above 1 + clip = {1.0 + self.clip}")

    def row_weights(self, lengths: Tensor, rows: float) -> Tensor:
        return token_mean(lengths)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        ratio = log_ratio(inputs.logprobs, inputs.old).exp()
        terms = clipped_surrogate(ratio, inputs.advantages, self.clip, self.clip)
        if self.dual_clip is None:
            return terms
        bound = -self.dual_clip * inputs.advantages
        bounded = (inputs.advantages < 0) & (ratio > self.dual_clip)
        return LossTerms(torch.where(bounded, bound, terms.values), terms.clipped_low, terms.clipped_high | bounded)
