"""What a learner minimises, whichever backend computes the logprobs: loss, correction, KL and entropy put together once.

sum over rows of weight x sum over the row's policy tokens of value x correction
  + kl x sum over tokens of KL(policy || base model) / tokens - entropy x sum over tokens of entropy / tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from towline.config import TrainerSettings
from towline.errors import UsageError
from towline.learner.corrections.base import Correction
from towline.learner.corrections.none import NoCorrection
from towline.learner.losses.base import Loss, LossInputs, LossTerms, log_ratio
from towline.learner.losses.decoupled_ppo import DecoupledPPO
from towline.learner.penalties.kl import kl_k3
from towline.learner.registry import CORRECTIONS, LOSSES, build

NO_SIGNAL = 1e-6
"""An advantage that is smaller says nothing: a group of equal rewards."""


@dataclass(frozen=True, slots=True)
class Objective:
    """`kl` and `entropy` are the weights of those two terms; 0 leaves one out."""

    loss: Loss
    correction: Correction
    kl: float
    entropy: float

    @classmethod
    def of(cls, trainer: TrainerSettings) -> Objective:
        """`UsageError` where the settings name what there isn't, or what doesn't go together."""
        arguments = dict(trainer.loss_arguments)
        kl, entropy = float(arguments.pop("kl", 0.0)), float(arguments.pop("entropy", 0.0))
        loss: Loss = build("trainer.loss", LOSSES, trainer.loss, arguments)
        correction: Correction = build("trainer.correction", CORRECTIONS, trainer.correction, trainer.correction_arguments)
        if isinstance(loss, DecoupledPPO) and not isinstance(correction, NoCorrection):
            raise UsageError(
                "trainer.loss = 'decoupled_ppo' weighs by itself; set trainer.correction = 'none'", code="correction"
            )
        return cls(loss, correction, kl, entropy)

    @property
    def needs_proximal(self) -> bool:
        """Whether the ratio is taken against the policy before the batch's first step, instead of the behaviour policy."""
        return self.loss.needs_proximal or self.correction.needs_proximal

    def kept(self, advantages: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """The rows that a step can learn from: with KL or entropy all, else those with an advantage."""
        if self.kl or self.entropy:
            return np.arange(advantages.size)
        return np.flatnonzero(np.abs(advantages) > NO_SIGNAL)

    def __call__(
        self, inputs: LossInputs, row_weights: Tensor, *, tokens: float, reference: Tensor | None, entropies: Tensor | None
    ) -> tuple[Tensor, LossTerms]:
        """A micro batch's part of the minibatch's loss, a scalar.

        row_weights: f32[R]. tokens: the minibatch's policy tokens, over all ranks. reference: f32[N] logprobs under the base
        model, where there is a KL term. entropies: f32[N], where there is an entropy term.
        """
        terms = self.loss(inputs)
        values = terms.values
        if self.correction.needs_proximal:
            values = values * self.correction(log_ratio(inputs.old, inputs.behaviour), inputs.rows, inputs.lengths)
        total = (values * row_weights[inputs.rows]).sum()
        if reference is not None:
            total = total + self.kl * kl_k3(inputs.logprobs, reference).sum() / tokens
        if entropies is not None:
            total = total - self.entropy * entropies.sum() / tokens
        return total, terms


def weights_of(rows: npt.NDArray[np.int64], weights: dict[int, float], device: torch.device) -> Tensor:
    """f32[R] of the rows at hand."""
    return torch.tensor([weights[int(row)] for row in rows], device=device)
