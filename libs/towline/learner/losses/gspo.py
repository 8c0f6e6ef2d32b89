"""GSPO: one clipped ratio per sample, the geometric mean of its tokens' ratios."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from towline.learner.losses.base import MAX_LOG_RATIO, LossInputs, LossTerms, clipped_surrogate, row_means, sequence_mean


@dataclass(frozen=True, slots=True)
class GSPO:
    """L = -mean_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i), s_i = exp(mean_t log(pi(t) / pi_old(t))).

    Zheng et al. 2025 (arXiv:2507.18071), eq. 5 and 7; the bounds are theirs (section 5.1).
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    needs_proximal: ClassVar[bool] = False

    def row_weights(self, lengths: Tensor, rows: float) -> Tensor:
        return sequence_mean(lengths, rows)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        means = row_means(inputs.logprobs - inputs.old, inputs.rows, inputs.lengths)
        ratio = means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return clipped_surrogate(ratio[inputs.rows], inputs.advantages, self.clip_low, self.clip_high)
