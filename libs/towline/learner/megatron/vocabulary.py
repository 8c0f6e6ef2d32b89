"""Logprobs and entropies, with gradients, where each tensor parallel rank has some of the vocabulary's logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor


class _Logprobs(torch.autograd.Function):  # type: ignore[misc]  # torch isn't typed here
    """log softmax(z)[t] and log sum exp z, of f32[N, v] columns [first, first + v) on each rank; equal on all of them.

    With g and h the two results' gradients, z's is g (1[t] - softmax z) + h softmax z.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: Any) -> tuple[Tensor, Tensor]:
        columns = logits.shape[1]
        largest = logits.max(-1).values if columns else torch.full_like(targets, -torch.inf, dtype=logits.dtype)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        exponentials = (logits - largest[:, None]).exp()
        here = (targets >= first) & (targets < first + columns)
        local = (targets - first).clamp(0, max(columns - 1, 0))
        picked = logits.gather(1, local[:, None])[:, 0] - largest if columns else torch.zeros_like(largest)
        both = torch.stack([exponentials.sum(-1), torch.where(here, picked, torch.zeros_like(picked))])
        dist.all_reduce(both, group=group)
        log_sum = both[0].log()
        ctx.save_for_backward(exponentials.div_(both[0][:, None]), local, here)
        return both[1] - log_sum, log_sum + largest

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local, here = ctx.saved_tensors
        of_logprob, of_log_sum = gradients
        result = softmax * (of_log_sum - of_logprob)[:, None]
        if softmax.shape[1]:
            result.scatter_add_(1, local[:, None], torch.where(here, of_logprob, torch.zeros_like(of_logprob))[:, None])
        return result, None, None, None


def logprobs_of(logits: Tensor, targets: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """(f32[N] logprobs of i64[N] targets, f32[N] log-sum-exp) of this rank's f32[N, v] logits, temperature applied.

    The vocabulary is split evenly after padding; columns beyond `vocabulary` take no part.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[1]
    logprobs, log_sum = _Logprobs.apply(_true_columns(logits, first, vocabulary), targets, first, group)
    return logprobs, log_sum


def entropies_of(logits: Tensor, log_sum: Tensor, vocabulary: int) -> Tensor:
    """f32[N]: H = log sum_v exp z_v - sum_v p_v z_v, in nats, with the log-sum-exp that `logprobs_of` gave."""
    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[1]
    mine = _true_columns(logits, first, vocabulary)
    # Each rank's columns use the common log-sum-exp: its gradient is the sum of theirs.
    common = copy_to_tensor_model_parallel_region(log_sum)
    expected = ((mine - common[:, None]).exp() * mine).sum(-1)
    return log_sum - reduce_from_tensor_model_parallel_region(expected)


def _true_columns(logits: Tensor, first: int, vocabulary: int) -> Tensor:
    return logits[:, : max(0, min(logits.shape[1], vocabulary - first))]
