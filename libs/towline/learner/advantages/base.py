"""What an advantage function is, and its application to a batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Advantage = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
"""The rewards f64[n] of one group -> f64[n]."""


def by_group(advantage: Advantage, groups: npt.NDArray[np.int64], rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """f64[R] for R rows of many groups, in any order."""
    result = np.zeros(rewards.size)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        result[members] = advantage(rewards[members])
    return result
