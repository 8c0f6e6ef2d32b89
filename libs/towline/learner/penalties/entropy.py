"""The entropy bonus: keeps the policy from collapsing onto one token."""

from __future__ import annotations

from torch import Tensor


def entropy(log_softmax: Tensor) -> Tensor:
    """f32[N] of f32[N, V]: -sum_v p_v log p_v, in nats. Williams & Peng 1991; Mnih et al. 2016 (arXiv:1602.01783), section 4."""
    return -(log_softmax.exp() * log_softmax).sum(-1)
