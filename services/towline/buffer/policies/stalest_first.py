"""The group nearest to the staleness bound first, so that the fewest are lost to it; the default."""

from __future__ import annotations

from towline.buffer.policies.base import Candidate


def stalest_first(candidate: Candidate) -> tuple[int, int]:
    return candidate.least_depth, candidate.number
