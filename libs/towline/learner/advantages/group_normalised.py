"""GRPO's advantage: a reward against its group's mean, in units of its spread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

EPSILON = 1e-4


def group_normalised(rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-4) over one group f64[n], the sample standard deviation; 0 for a group of one.

    Shao et al. 2024 (arXiv:2402.03300), section 4.1.2.
    """
    if rewards.size < 2:
        return np.zeros_like(rewards)
    return np.asarray((rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON))
