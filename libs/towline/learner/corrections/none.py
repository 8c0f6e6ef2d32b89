"""No correction: the ratio is taken against the behaviour policy itself, whose logprobs the engine reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NoCorrection:
    """w_t = 1."""

    needs_proximal: ClassVar[bool] = False

    def __call__(self, log_ratio: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
        return torch.ones_like(log_ratio)
