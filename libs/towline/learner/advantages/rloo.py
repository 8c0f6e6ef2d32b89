"""RLOO's advantage: a reward against the mean of the others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def rloo(rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A_i = R_i - mean of R_j, j != i, over one group f64[n]; 0 for a group of one.

    Ahmadian et al. 2024 (arXiv:2402.14740), section 3.
    """
    if rewards.size < 2:
        return np.zeros_like(rewards)
    others = (rewards.sum() - rewards) / (rewards.size - 1)
    return np.asarray(rewards - others)
