"""Dr.GRPO's advantage: a reward against its group's mean, its scale left alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def group_centred(rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A_i = R_i - mean(R) over one group f64[n]. Liu et al. 2025 (arXiv:2503.20783), section 3.2."""
    return np.asarray(rewards - rewards.mean()) if rewards.size else rewards
