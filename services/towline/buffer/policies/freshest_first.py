"""The newest policy's groups first: the least off-policy batch, at the price of dropping what becomes stale meanwhile.

Long samples start earlier, so their groups are the stalest: this policy trains on shorter ones (see `length_bias`).
"""

from __future__ import annotations

from towline.buffer.policies.base import Candidate


def freshest_first(candidate: Candidate) -> tuple[int, int]:
    return -candidate.least_depth, candidate.number
