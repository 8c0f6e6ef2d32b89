"""Lets an SGLang server on a CPU draw by seed: its seeded sampler needs one operator that only the CUDA kernels bring.

The operator is a 32-bit MurmurHash3 of (seed, position, column), the same function that SGLang's Triton kernel computes.
"""

from __future__ import annotations

from typing import Any

import torch

_MASK = 0xFFFFFFFF
_library = torch.library.Library("sgl_kernel", "FRAGMENT")


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = (word * 0xCC9E2D51) & _MASK
    word = ((word << 15) | (word >> 17)) & _MASK
    state = state ^ ((word * 0x1B873593) & _MASK)
    state = ((state << 13) | (state >> 19)) & _MASK
    return (state * 5 + 0xE6546B64) & _MASK


def murmur(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """seed 64-bit[B], positions int[B], columns int[V] -> uint32[B, V]."""
    word = seed.view(torch.int64)[:, None]
    state = _mix(torch.zeros_like(word), word & _MASK)
    state = _mix(state, (word >> 32) & _MASK)
    state = _mix(state, positions.to(torch.int64)[:, None] & _MASK)
    state = _mix(state, columns.to(torch.int64)[None, :] & _MASK) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return (state ^ (state >> 16)).to(torch.uint32)


def allow() -> None:
    """Define the operator, admit the CPU's attention backend, and leave out the accelerators' batch-invariant matmuls."""
    import sglang.srt.batch_invariant_ops as outer
    import sglang.srt.batch_invariant_ops.batch_invariant_ops as inner
    from sglang.srt.arg_groups import choices

    _library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    _library.impl("murmur_hash32_cpu", murmur, "CPU")
    if "torch_native" not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        choices.add_deterministic_attention_backend_choices(["torch_native"])

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    outer.enable_batch_invariant_mode = inner.enable_batch_invariant_mode = nothing
