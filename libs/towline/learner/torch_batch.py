"""From packed rows to minibatches, and from those to padded micro batches of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from towline.learner.base import TrainBatch
from towline.learner.torch_model import Chosen

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows, padded; per policy token what the loss needs, N long, row by row."""

    indices: Indices
    """[B] rows of the batch."""
    chosen: Chosen
    behaviour: Tensor
    """f32[N]"""
    advantages: Tensor
    """f32[N]"""
    rows: Tensor
    """i64[N] in [0, B)"""
    lengths: Tensor
    """f32[B] policy tokens."""


def split_by_tokens(batch: TrainBatch, rows: Indices, limit: int) -> list[Indices]:
    """The rows, shortest first, in runs of at most `limit` padded tokens; a row that is longer than that is alone."""
    lengths = batch.lengths
    parts: list[Indices] = []
    first = 0
    ordered = rows[np.argsort(lengths[rows], kind="stable")]
    for end in range(1, ordered.size + 1):
        if end == ordered.size or (end + 1 - first) * int(lengths[ordered[end]]) > limit:
            parts.append(ordered[first:end])
            first = end
    return parts


def micro_batches(batch: TrainBatch, rows: Indices, limit: int, device: torch.device) -> Iterator[MicroBatch]:
    """`rows` as micro batches of at most `limit` padded tokens each."""
    return (micro_batch(batch, part, device) for part in split_by_tokens(batch, rows, limit))


def micro_batch(batch: TrainBatch, indices: Indices, device: torch.device) -> MicroBatch:
    """The rows `indices` as one padded block."""
    lengths = batch.lengths[indices]
    columns = np.arange(int(lengths.max()))
    inside = columns[None] < lengths[:, None]
    where = np.where(inside, batch.starts[indices][:, None] + columns[None], 0)
    tokens = np.where(inside, batch.tokens[where], 0).astype(np.int64)
    policy = (inside & (batch.loss_mask[where] == 1))[:, 1:]
    owners = np.nonzero(policy)[0]

    def tensor(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return MicroBatch(
        indices=indices,
        chosen=Chosen(
            inputs=tensor(tokens[:, :-1]),
            positions=tensor(policy),
            targets=tensor(tokens[:, 1:][policy]),
            temperatures=tensor(batch.temperatures[indices][owners]),
        ),
        behaviour=tensor(batch.logprobs[where][:, 1:][policy]),
        advantages=tensor(batch.advantages[indices][owners]),
        rows=tensor(owners),
        lengths=tensor(policy.sum(1).astype(np.float32)),
    )
