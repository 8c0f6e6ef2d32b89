"""Dr.GRPO: GRPO without its length and difficulty biases. Goes with the advantage `group_centred`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from towline.learner.losses.base import LossInputs, LossTerms, clipped_surrogate, log_ratio


@dataclass(frozen=True, slots=True)
class DrGRPO:
    """L = -1 / (G max_tokens) sum_i sum_t min(r_t A_i, clip(r_t, 1 - clip_low, 1 + clip_high) A_i), A_i = R_i - mean(R).

    Liu et al. 2025 (arXiv:2503.20783), section 3.2: the sum over a sample's tokens is divided by a constant, the generation
    budget `max_tokens`, never by its own length, so that long wrong answers aren't favoured.
    """

    max_tokens: int
    clip_low: float = 0.2
    clip_high: float = 0.2
    needs_proximal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")

    def row_weights(self, lengths: Tensor, rows: float) -> Tensor:
        return torch.full_like(lengths, 1.0 / (rows * self.max_tokens))

    def __call__(self, inputs: LossInputs) -> LossTerms:
        ratio = log_ratio(inputs.logprobs, inputs.old).exp()
        return clipped_surrogate(ratio, inputs.advantages, self.clip_low, self.clip_high)
