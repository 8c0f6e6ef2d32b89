"""The KV cache of a running batch: rows that join and leave between steps, all ending at the same column.

A row shorter than the batch has padding on its left, which the attention mask hides. Each layer's keys and values lie in
one buffer with room to the right, so a step writes one column and copies nothing; rows move only in `regroup`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

_LEAST_ROOM = 16


def _room(columns: int) -> int:
    return max(_LEAST_ROOM, columns // 4)


class _Layer(DynamicLayer):  # type: ignore[misc]
    """keys and values: [rows, heads, columns, head size], of which the first `length` columns are filled."""

    keys: torch.Tensor
    values: torch.Tensor
    is_initialized: bool

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.length + key_states.shape[2]
        if not self.is_initialized or end > self.keys.shape[2]:
            columns = end + (_room(end) if self.is_initialized else 0)
            self.keys = _grown(self.keys, key_states, self.length, columns)
            self.values = _grown(self.values, value_states, self.length, columns)
            self.is_initialized = True
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length


def _grown(old: torch.Tensor | None, like: torch.Tensor, length: int, columns: int) -> torch.Tensor:
    rows, heads, _, size = like.shape
    new = like.new_zeros(rows, heads, columns, size)
    if old is not None:
        new[:, :, :length] = old[:, :, :length]
    return new


class BatchCache(Cache):  # type: ignore[misc]
    """A Hugging Face cache that can be regrouped. `padding` int64[rows]: each row's empty columns on the left."""

    def __init__(self, layers: int, padding: npt.NDArray[np.int64]) -> None:
        super().__init__(layers=[_Layer() for _ in range(layers)])
        self.padding = padding

    @property
    def columns(self) -> int:
        return int(self.layers[0].length)

    def mask(self, more: int, device: torch.device) -> torch.Tensor | None:
        """bool[rows, columns + more], True where there is a token; None where no row has padding."""
        if not self.padding.any():
            return None
        index = np.arange(self.columns + more, dtype=np.int64)
        return torch.from_numpy(index >= self.padding[:, None]).to(device)


def regroup(parts: Sequence[tuple[BatchCache, npt.NDArray[np.int64]]]) -> BatchCache:
    """One cache of the chosen rows of each part, in order, without columns that are padding in all of them.

    Each part is (cache, row indices); at least one row in all. The parts lose their buffers on the way, layer by layer,
    so that the peak is the old cache, the new one and no more.
    """
    filled = [cache.columns - int(cache.padding[rows].min()) for cache, rows in parts if rows.size]
    parts = [(cache, rows) for cache, rows in parts if rows.size]
    columns, total = max(filled), sum(rows.size for _, rows in parts)
    joined = BatchCache(
        len(parts[0][0].layers), np.concatenate([cache.padding[rows] + columns - cache.columns for cache, rows in parts])
    )
    indices = [torch.from_numpy(rows).to(cache.layers[0].keys.device) for cache, rows in parts]
    for number, layer in enumerate(joined.layers):
        for name in ("keys", "values"):
            like = getattr(parts[0][0].layers[number], name)
            new = like.new_empty(total, like.shape[1], columns + _room(columns), like.shape[3])
            row = 0
            for (cache, rows), index, width in zip(parts, indices, filled, strict=True):
                old = getattr(cache.layers[number], name)[:, :, cache.columns - width : cache.columns]
                into = new[row : row + rows.size]
                into[:, :, columns - width : columns] = old.index_select(0, index)
                # Masked columns are multiplied by zero, which leaves a NaN a NaN.
                into[:, :, : columns - width] = 0
                row += rows.size
            setattr(layer, name, new)
        layer.length, layer.is_initialized = columns, True
        for cache, _ in parts:
            cache.layers[number].keys = cache.layers[number].values = None
    return joined
