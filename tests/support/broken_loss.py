"""A policy loss that isn't finite, for one of its calls on one rank."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from towline.learner.losses.base import LossInputs, LossTerms, token_mean


@dataclass
class BrokenOnce:
    """NaN at call number `call` (from 0), with `gradient` a finite value of infinite gradient; on all ranks, or on `rank`."""

    call: int
    rank: int | None = None
    gradient: bool = False
    calls: list[None] = field(default_factory=list)
    needs_proximal: ClassVar[bool] = False

    def row_weights(self, lengths: torch.Tensor, rows: float) -> torch.Tensor:
        return token_mean(lengths)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        values = -inputs.advantages * inputs.logprobs
        if len(self.calls) == self.call and self.rank in (None, int(os.environ.get("RANK", "0"))):
            values = values + torch.sqrt(inputs.logprobs - inputs.logprobs.detach()) if self.gradient else values * torch.nan
        self.calls.append(None)
        none = torch.zeros_like(values, dtype=torch.bool)
        return LossTerms(values, none, none)
