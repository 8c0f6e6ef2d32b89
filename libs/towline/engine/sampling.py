"""Counter-based uniform numbers: a sample's token i gets the same number wherever, whenever and beside whom it is drawn.

The generator is splitmix64 (Steele, Lea, Flood 2014; constants of Vigna's reference code): its i-th output is a bijective
mix of state + i * gamma, so any of them is computed without those before it. The seed is mixed first, so that
neighbouring seeds give unrelated streams.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def seed_word(seed: int) -> np.uint64:
    """Any integer as the 64 bits that `uniforms` takes; negative ones wrap."""
    return np.uint64(seed & _MASK)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, token position); arrays of one shape."""
    with np.errstate(over="ignore"):
        state = _mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    word = (word ^ (word >> np.uint64(30))) * _MIX_1
    word = (word ^ (word >> np.uint64(27))) * _MIX_2
    return word ^ (word >> np.uint64(31))
