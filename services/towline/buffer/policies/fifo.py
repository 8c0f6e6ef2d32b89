"""In the order of admission: prompts are trained in the order in which the source gave them."""

from __future__ import annotations

from towline.buffer.policies.base import Candidate


def fifo(candidate: Candidate) -> int:
    return candidate.number
