"""Some rows of a batch as padded micro batches of a bounded size, for a model whose sequences are split over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from towline.learner.base import TrainBatch

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """B rows of at most T tokens, and N policy tokens of theirs, row by row."""

    indices: Indices
    """[B] rows of the `TrainBatch`."""
    inputs: Tensor
    """i64[B, T']; T' >= T - 1, padding on the right, which a causal model's earlier positions don't see."""
    positions: Tensor
    """bool[B, T']: the next token was the policy's."""
    targets: Tensor
    """i64[N]"""
    temperatures: Tensor
    """f32[N]"""
    behaviour: Tensor
    """f32[N]"""
    advantages: Tensor
    """f32[N]"""
    rows: Tensor
    """i64[N] in [0, B)"""
    staleness: npt.NDArray[np.int64]
    """[N] the row's, in depths."""
    lengths: Tensor
    """f32[B] policy tokens."""


def micro_batches(batch: TrainBatch, rows: Indices, limit: int, multiple: int, device: torch.device) -> list[MicroBatch]:
    """The rows, longest first, in blocks of at most `limit` padded tokens (a longer row is alone), T' a multiple of `multiple`.

    Without rows one empty block: a rank that has none takes part in the step.
    """
    if not rows.size:
        return [_empty(multiple, device)]
    lengths = batch.lengths
    ordered = rows[np.argsort(-lengths[rows], kind="stable")]
    blocks: list[Indices] = []
    first = 0
    for end in range(1, ordered.size + 1):
        if end == ordered.size or (end + 1 - first) * _width(int(lengths[ordered[first]]), multiple) > limit:
            blocks.append(ordered[first:end])
            first = end
    return [_block(batch, block, multiple, device) for block in blocks]


def sequence(tokens: list[int], multiple: int, device: torch.device) -> MicroBatch:
    """One sequence at temperature 1, all of whose tokens but the first are policy tokens."""
    count = len(tokens) - 1
    width = _width(len(tokens), multiple)
    inputs = torch.zeros(1, width, dtype=torch.int64, device=device)
    inputs[0, :count] = torch.tensor(tokens[:-1], device=device)
    nothing = torch.zeros(count, device=device)
    return MicroBatch(
        indices=np.zeros(1, np.int64),
        inputs=inputs,
        positions=(torch.arange(width, device=device) < count)[None],
        targets=torch.tensor(tokens[1:], dtype=torch.int64, device=device),
        temperatures=torch.ones(count, device=device),
        behaviour=nothing,
        advantages=nothing,
        rows=torch.zeros(count, dtype=torch.int64, device=device),
        staleness=np.zeros(count, np.int64),
        lengths=torch.full((1,), float(count), device=device),
    )


def filled_positions(micros: list[MicroBatch], batch: TrainBatch) -> tuple[int, int]:
    """(positions that held a token, positions computed)."""
    held = sum(int((batch.lengths[micro.indices] - 1).sum()) for micro in micros if micro.indices.size)
    return held, sum(micro.inputs.numel() for micro in micros)


def _width(length: int, multiple: int) -> int:
    return -(-max(length - 1, 1) // multiple) * multiple


def _block(batch: TrainBatch, indices: Indices, multiple: int, device: torch.device) -> MicroBatch:
    lengths = batch.lengths[indices]
    width = _width(int(lengths.max()), multiple)
    columns = np.arange(width + 1)
    inside = columns[None] < lengths[:, None]
    where = np.where(inside, batch.starts[indices][:, None] + columns[None], 0)
    tokens = np.where(inside, batch.tokens[where], 0).astype(np.int64)
    policy = (inside & (batch.loss_mask[where] == 1))[:, 1:]
    owners = np.nonzero(policy)[0]

    def tensor(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return MicroBatch(
        indices=indices,
        inputs=tensor(tokens[:, :-1]),
        positions=tensor(policy),
        targets=tensor(tokens[:, 1:][policy]),
        temperatures=tensor(batch.temperatures[indices][owners]),
        behaviour=tensor(batch.logprobs[where][:, 1:][policy]),
        advantages=tensor(batch.advantages[indices][owners]),
        rows=tensor(owners),
        staleness=batch.staleness[indices][owners].astype(np.int64),
        lengths=tensor(policy.sum(1).astype(np.float32)),
    )


def _empty(multiple: int, device: torch.device) -> MicroBatch:
    nothing = torch.zeros(0, device=device)
    return MicroBatch(
        indices=np.zeros(0, np.int64),
        inputs=torch.zeros(1, multiple, dtype=torch.int64, device=device),
        positions=torch.zeros(1, multiple, dtype=torch.bool, device=device),
        targets=torch.zeros(0, dtype=torch.int64, device=device),
        temperatures=nothing,
        behaviour=nothing,
        advantages=nothing,
        rows=torch.zeros(0, dtype=torch.int64, device=device),
        staleness=np.zeros(0, np.int64),
        lengths=nothing,
    )
