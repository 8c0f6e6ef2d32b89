"""The KL penalty against a reference policy: how far the policy in training may leave the base model."""

from __future__ import annotations

from torch import Tensor

from towline.learner.losses.base import log_ratio


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """f32[N]: exp(d) - d - 1 with d = log pi_ref - log pi, an unbiased, non-negative estimate of KL(pi || pi_ref) per token.

    Schulman 2020, "Approximating KL divergence"; in GRPO: Shao et al. 2024 (arXiv:2402.03300), eq. 4.
    """
    difference = log_ratio(reference, logprobs)
    return difference.exp() - difference - 1.0
