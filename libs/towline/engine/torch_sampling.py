"""Draws one token a row from logits by the inverse of the cumulative distribution, and says its behaviour logprob."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The rows' sampling parameters on the device, float32[B] or int64[B]; None where no row needs one."""

    temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    """bool[B]."""
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None

    @classmethod
    def of(
        cls,
        temperature: npt.NDArray[np.float32],
        top_k: npt.NDArray[np.int64],
        top_p: npt.NDArray[np.float32],
        *,
        vocabulary: int,
        device: torch.device,
    ) -> SamplingPlan:
        """From host arrays: temperature 0 is greedy, top_k 0 and top_p 1 are off."""
        greedy, limited = temperature == 0, (top_k > 0) & (top_k < vocabulary)
        scale = np.where(greedy, np.float32(1), temperature)
        return cls(
            temperature=_on(scale, device) if (scale != 1).any() else None,
            greedy=_on(greedy, device) if greedy.any() else None,
            top_k=_on(np.where(limited, top_k, vocabulary), device) if limited.any() else None,
            top_p=_on(top_p, device) if (top_p < 1).any() else None,
        )


def draw(logits: torch.Tensor, plan: SamplingPlan, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [B, V] of any float dtype, uniform float64[B] in [0, 1) -> tokens int64[B], logprobs float32[B].

    NaN logits give a NaN logprob.
    """
    logits = logits.float()
    if plan.temperature is not None:
        logits = logits / plan.temperature[:, None]
    logprobs = torch.log_softmax(logits, -1)
    probabilities = logprobs.exp()
    if plan.top_k is not None or plan.top_p is not None:
        probabilities = _restrict(probabilities, plan)
    # In float64: in float32 the rounding of the sum would be wider than a rare token's whole share.
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Strictly below the total, so that the first larger value exists and belongs to a token with a positive share.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # The clamp is for NaN logits, which compare with nothing; their logprob comes out NaN.
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    if plan.greedy is not None:
        tokens = torch.where(plan.greedy[:, None], logprobs.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def _restrict(probabilities: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
    """Zero outside the top-k most likely and outside the smallest set whose share reaches top-p, as Hugging Face does:
    top-p's shares are those after top-k; ties go to the lower token ID."""
    ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
    if plan.top_k is not None:
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        ordered = ordered.masked_fill(rank >= plan.top_k[:, None], 0)
    if plan.top_p is not None:
        share = ordered.cumsum(-1, dtype=torch.float64)
        before = share - ordered
        ordered = ordered.masked_fill(before >= plan.top_p[:, None] * share[:, -1:], 0)
    return torch.zeros_like(probabilities).scatter_(-1, index, ordered)


def _on(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
