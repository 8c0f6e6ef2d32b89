"""What a correction is: a weight per token for the mismatch between the engine that sampled and the trainer that learns."""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor


class Correction(Protocol):
    """With `needs_proximal` the loss's ratio is taken against the proximal policy, and this weight makes up for the rest."""

    needs_proximal: ClassVar[bool]

    def __call__(self, log_ratio: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
        """f32[N] weights of the loss values, without gradient.

        `log_ratio` f32[N] is log(pi_prox / pi_behaviour); `rows` i64[N] and `lengths` f32[R] are as in `LossInputs`.
        """
        ...
