"""By a number `priority` in the prompt's reference, the greatest first; prompts without one have 0. Then the stalest."""

from __future__ import annotations

from towline.buffer.policies.base import Candidate


def priority(candidate: Candidate) -> tuple[float, int, int]:
    return -float(candidate.reference.get("priority", 0.0)), candidate.least_depth, candidate.number
