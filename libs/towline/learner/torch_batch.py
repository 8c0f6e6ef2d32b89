"""From packed rows to minibatches, and from those to micro batches of a bounded size.

A micro batch is a block of lines. Padded, each row is a line of its own, rows of like length together. Packed, rows lie end to
end in lines as long as the longest row, each with positions from 0, and attention doesn't look from one into another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from towline.learner.base import TrainBatch
from towline.learner.torch_model import Chosen

Indices = npt.NDArray[np.int64]
Lines = list[list[int]]
"""Rows of the batch, line by line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows; per policy token what the loss needs, N long, row by row."""

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
    staleness: Indices
    """i64[N], the row's at each of its tokens."""
    filled: int
    """Positions of `chosen.inputs` that hold a token."""


def micro_batches(batch: TrainBatch, rows: Indices, limit: int, device: torch.device, *, packed: bool) -> list[MicroBatch]:
    """`rows` as micro batches of at most `limit` positions each; a row that is longer than that is alone."""
    blocks = packed_blocks(batch, rows, limit) if packed else padded_blocks(batch, rows, limit)
    return [micro_batch(batch, lines, device, packed=packed) for lines in blocks]


def padded_blocks(batch: TrainBatch, rows: Indices, limit: int) -> list[Lines]:
    """A row a line, shortest first, so that lines of one block are about as long."""
    lengths = batch.lengths
    blocks: list[Lines] = []
    first = 0
    ordered = rows[np.argsort(lengths[rows], kind="stable")]
    for end in range(1, ordered.size + 1):
        if end == ordered.size or (end + 1 - first) * int(lengths[ordered[end]]) > limit:
            blocks.append([[int(row)] for row in ordered[first:end]])
            first = end
    return blocks


def packed_blocks(batch: TrainBatch, rows: Indices, limit: int) -> list[Lines]:
    """Lines as long as the longest row, filled longest first, each row into the fullest line that has room for it."""
    if not rows.size:
        return []
    sizes = _positions(batch)
    width = int(sizes[rows].max())
    lines: Lines = []
    room: list[int] = []
    for row in rows[np.argsort(-sizes[rows], kind="stable")]:
        size = int(sizes[row])
        fitting = [line for line, left in enumerate(room) if left >= size]
        if fitting:
            line = min(fitting, key=lambda each: room[each])
            lines[line].append(int(row))
            room[line] -= size
        else:
            lines.append([int(row)])
            room.append(width - size)
    count = max(limit // max(width, 1), 1)
    return [lines[first : first + count] for first in range(0, len(lines), count)]


def micro_batch(batch: TrainBatch, lines: Lines, device: torch.device, *, packed: bool) -> MicroBatch:
    """The lines as one block, padded on the right to the longest."""
    sizes = _positions(batch)
    width = max(sum(int(sizes[row]) for row in line) for line in lines)
    inputs = np.zeros((len(lines), width), np.int64)
    targets = np.zeros_like(inputs)
    positions = np.zeros_like(inputs)
    policy = np.zeros(inputs.shape, bool)
    behaviour = np.zeros(inputs.shape, np.float32)
    indices = np.array([row for line in lines for row in line], np.int64)
    counts = np.zeros(indices.size, np.int64)
    number = 0
    for line, members in enumerate(lines):
        at = 0
        for row in members:
            start, end, stop = int(batch.starts[row]), int(batch.starts[row + 1]), at + int(sizes[row])
            inputs[line, at:stop] = batch.tokens[start : end - 1]
            targets[line, at:stop] = batch.tokens[start + 1 : end]
            policy[line, at:stop] = batch.loss_mask[start + 1 : end] == 1
            behaviour[line, at:stop] = batch.logprobs[start + 1 : end]
            positions[line, at:stop] = np.arange(stop - at)
            counts[number] = np.count_nonzero(policy[line, at:stop])
            at = stop
            number += 1
        # Padding is a sequence of its own, and one that nothing is asked of.
        positions[line, at:] = np.arange(width - at)
    owners = np.repeat(np.arange(indices.size), counts)

    def tensor(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return MicroBatch(
        indices=indices,
        chosen=Chosen(
            inputs=tensor(inputs),
            positions=tensor(policy),
            targets=tensor(targets[policy]),
            temperatures=tensor(batch.temperatures[indices][owners]),
            places=tensor(positions) if packed else None,
        ),
        behaviour=tensor(behaviour[policy]),
        advantages=tensor(batch.advantages[indices][owners]),
        rows=tensor(owners),
        lengths=tensor(counts.astype(np.float32)),
        staleness=batch.staleness[indices][owners].astype(np.int64),
        filled=int(sizes[indices].sum()),
    )


def idle_micro_batch(device: torch.device) -> MicroBatch:
    """One position, of which nothing is asked: a rank without rows goes through the model with the others, its gradient is 0."""
    nothing = torch.zeros(0, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(
        indices=np.zeros(0, np.int64),
        chosen=Chosen(
            inputs=torch.zeros(1, 1, dtype=torch.int64, device=device),
            positions=torch.zeros(1, 1, dtype=torch.bool, device=device),
            targets=none,
            temperatures=nothing,
        ),
        behaviour=nothing,
        advantages=nothing,
        rows=none,
        lengths=nothing,
        staleness=np.zeros(0, np.int64),
        filled=0,
    )


def _positions(batch: TrainBatch) -> Indices:
    """[R] what the model computes for each row: its last token isn't an input."""
    return batch.lengths - 1
