"""GRPO: a clipped ratio per token, no critic; the advantage comes from the sample's group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from towline.learner.losses.base import LossInputs, LossTerms, clipped_surrogate, log_ratio, sequence_mean, token_mean


@dataclass(frozen=True, slots=True)
class GRPO:
    """L = -mean_t min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A), r_t = pi(t) / pi_old(t).

    Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300), eq. 3. `mean` "sequence" is theirs (a mean over each sample, then over
    samples); "token", over all tokens of the minibatch, and the higher upper bound are DAPO's (Yu et al. 2025, arXiv:2503.14476).
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    mean: Literal["token", "sequence"] = "token"
    needs_proximal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.mean not in ("token", "sequence"):
            raise ValueError(f"mean = {self.mean!r}: use token or sequence")

    def row_weights(self, lengths: Tensor, rows: float) -> Tensor:
        return token_mean(lengths) if self.mean == "token" else sequence_mean(lengths, rows)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        ratio = log_ratio(inputs.logprobs, inputs.old).exp()
        return clipped_surrogate(ratio, inputs.advantages, self.clip_low, self.clip_high)
