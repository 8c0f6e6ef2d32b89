"""The live weights of an SGLang model under their Hugging Face names, taken apart where SGLang has fused or sharded them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@dataclass(frozen=True)
class View:
    """`data` holds hf_tensor.narrow(dim, start, data.shape[dim]); past the tensor's end lie zeros where SGLang padded."""

    data: torch.Tensor
    dim: int
    start: int

    def part(self, shape: list[int]) -> tuple[torch.Tensor, int]:
        """(the view less its padding, its length along `dim`) for a whole tensor of `shape`."""
        if not shape:
            return self.data, 0
        size = max(0, min(self.data.shape[self.dim], shape[self.dim] - self.start))
        return self.data.narrow(self.dim, 0, size), size


def live_views(model: torch.nn.Module) -> Iterator[tuple[str, View]]:
    """(Hugging Face name, view) for each parameter of this rank. Names that no checkpoint has mark what isn't understood."""
    for path, module in model.named_modules():
        base = path.rpartition(".")[0]
        for leaf, parameter in module.named_parameters(recurse=False):
            for name, view in _views(module, leaf, parameter.data):
                parts = (base, name, leaf) if name else (path, leaf)
                yield ".".join(part for part in parts if part), view


def _views(module: Any, leaf: str, data: torch.Tensor) -> Iterator[tuple[str, View]]:
    if isinstance(module, QKVParallelLinear):
        rank, _ = get_group_rank_size(module.tp_group)
        kv_rank = get_group_rank_size(module.kv_tp_group)[0] // module.num_kv_head_replicas
        sizes = (module.q_proj_shard_size, module.kv_proj_shard_size, module.v_proj_shard_size)
        yield from _fused(data, zip(_QKV, sizes, (rank, kv_rank, kv_rank), strict=True))
    elif isinstance(module, MergedColumnParallelLinear) and len(module.output_sizes) == len(_GATE_UP):
        rank, ranks = get_group_rank_size(module.tp_group)
        yield from _fused(data, ((name, size // ranks, rank) for name, size in zip(_GATE_UP, module.output_sizes, strict=True)))
    elif isinstance(module, VocabParallelEmbedding):  # the output head too
        shard = module.shard_indices
        size = shard.org_vocab_end_index - shard.org_vocab_start_index
        yield "", View(data.narrow(0, 0, size), 0, shard.org_vocab_start_index)
    elif isinstance(module, RowParallelLinear) and leaf == "weight":
        yield "", View(data, 1, get_group_rank_size(module.tp_group)[0] * data.shape[1])
    elif isinstance(module, ColumnParallelLinear):
        yield "", View(data, 0, get_group_rank_size(module.tp_group)[0] * data.shape[0])
    else:
        yield "", View(data, 0, 0)


def _fused(data: torch.Tensor, parts: Any) -> Iterator[tuple[str, View]]:
    at = 0
    for name, size, rank in parts:
        yield name, View(data.narrow(0, at, size), 0, rank * size)
        at += size
