"""Losses of a user's own, taken by import path: one that records what it is given, and two that aren't finite."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from towline.learner.losses.base import LossInputs, LossTerms, token_mean

RECORDED: list[LossInputs] = []


def _terms(values: torch.Tensor) -> LossTerms:
    none = torch.zeros_like(values, dtype=torch.bool)
    return LossTerms(values, none, none)


@dataclass
class Recording:
    needs_proximal: ClassVar[bool] = True

    def row_weights(self, lengths: torch.Tensor, rows: float) -> torch.Tensor:
        return token_mean(lengths)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        RECORDED.append(inputs)
        return _terms(-inputs.advantages * inputs.logprobs)


@dataclass
class Broken:
    """`kind` loss: a value that is NaN. gradient: a finite value whose gradient is infinite. overflow: finite gradients whose
    norm isn't. none: sound. The `first` calls are sound, and those after `first` + `last` are again."""

    kind: str = "none"
    first: int = 0
    last: int = 1_000_000
    calls: list[int] = field(default_factory=list)
    needs_proximal: ClassVar[bool] = False

    def row_weights(self, lengths: torch.Tensor, rows: float) -> torch.Tensor:
        return token_mean(lengths)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        self.calls.append(1)
        values = -inputs.advantages * inputs.logprobs
        if self.first < len(self.calls) <= self.first + self.last:
            if self.kind == "loss":
                values = values * float("nan")
            elif self.kind == "overflow":
                values = values * 1e30
            elif self.kind == "gradient":
                values = values + torch.sqrt(inputs.logprobs - inputs.logprobs.detach())
        return _terms(values)


@dataclass
class BrokenOnRank(Broken):
    """`Broken`, on one rank of the world alone."""

    rank: int = 0
    kind: str = "loss"

    def __post_init__(self) -> None:
        if int(os.environ.get("RANK", "0")) != self.rank:
            self.kind = "none"
