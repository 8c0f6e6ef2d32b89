"""What a learner is given, what it reports, and what every backend promises.

No torch here: the trainer service packs rows and reads reports without knowing the backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from towline.delta.state import ModelState
from towline.errors import MalformedError
from towline.learner.sharing import Place, Share

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trajectory of T tokens with its advantage. Arrays are one-dimensional, T long."""

    group: int
    sample: int
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    """1 where the policy chose the token."""
    logprobs: npt.NDArray[np.float32]
    """The behaviour policy's, after `temperature`; anything where loss_mask is 0."""
    versions: npt.NDArray[np.int32]
    """The policy version that sampled the token; -1 where loss_mask is 0."""
    temperature: float
    advantage: float
    staleness: int
    """In depths: the batch's for_depth minus the least depth among the row's versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """R rows packed end to end: row r is tokens [starts[r], starts[r + 1]) of the N-long arrays."""

    for_depth: int
    starts: npt.NDArray[np.int64]
    """[R + 1]"""
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    """0 where loss_mask is 0."""
    versions: npt.NDArray[np.int32]
    advantages: npt.NDArray[np.float32]
    """[R]"""
    temperatures: npt.NDArray[np.float32]
    """[R]"""
    staleness: npt.NDArray[np.int32]
    """[R]"""
    share: Share | None = None
    """Where several ranks split a batch: which rows these R are, and the others' weights. None: they are the whole batch."""

    @property
    def rows(self) -> int:
        return self.starts.size - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[R] tokens of each row, the prompt included."""
        return np.diff(self.starts)

    @property
    def policy_tokens(self) -> npt.NDArray[np.int64]:
        """[R] tokens of each row that the policy chose."""
        sums = np.concatenate([[0], np.cumsum(self.loss_mask, dtype=np.int64)])
        return np.asarray(sums[self.starts[1:]] - sums[self.starts[:-1]])


def check_row(row: Row, vocabulary: int) -> None:
    """Raise `MalformedError` where no learner could compute on the row."""
    name = f"row {row.group}.{row.sample}"
    if row.tokens.size and int(row.tokens.max()) >= vocabulary:
        raise MalformedError(f"{name}: token {int(row.tokens.max())} is outside the vocabulary of {vocabulary}", code="tokens")
    if not row.loss_mask.any() or row.loss_mask[0]:
        raise MalformedError(f"{name}: it needs a policy token, and a token before the first one", code="loss_mask")
    if not row.temperature > 0:
        raise MalformedError(f"{name}: temperature {row.temperature}; greedy samples can't be trained on", code="temperature")
    if not np.isfinite(row.advantage):
        raise MalformedError(f"{name}: the advantage isn't finite", code="advantage")


def pack_rows(for_depth: int, rows: Sequence[Row], share: Share | None = None) -> TrainBatch:
    """The rows as a batch; `rows` may be empty. With `share` they are those that `share.mine` numbers, in that order."""
    mask = _join([row.loss_mask for row in rows], np.uint8)
    return TrainBatch(
        for_depth=for_depth,
        starts=np.concatenate([[0], np.cumsum([row.tokens.size for row in rows], dtype=np.int64)]).astype(np.int64),
        tokens=_join([row.tokens for row in rows], np.int32),
        loss_mask=mask,
        logprobs=np.where(mask == 1, _join([row.logprobs for row in rows], np.float32), np.float32(0)),
        versions=_join([row.versions for row in rows], np.int32),
        advantages=np.array([row.advantage for row in rows], np.float32),
        temperatures=np.array([row.temperature for row in rows], np.float32),
        staleness=np.array([row.staleness for row in rows], np.int32),
        share=share,
    )


def _join(parts: Sequence[npt.NDArray[Any]], dtype: type[Scalar]) -> npt.NDArray[Scalar]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one batch did. Shares are of policy tokens; a value that nothing was computed for is 0."""

    for_depth: int
    rows: int
    """That had a signal and were trained on."""
    tokens: int
    """Policy tokens trained on."""
    loss: float = 0.0
    """Mean over the optimiser steps."""
    learning_rate: float = 0.0
    gradient_norm: float = 0.0
    """Before clipping, mean over the optimiser steps."""
    clip_low: float = 0.0
    clip_high: float = 0.0
    """Share of tokens whose ratio is below or above its bound and whose gradient that stops."""
    mismatch_kl: float = 0.0
    """KL(behaviour || trainer) per token before the first optimiser step, by the k3 estimator."""
    logprob_abs_diff: float = 0.0
    """Mean |trainer's logprob - behaviour logprob| before the first optimiser step."""
    effective_sample_share: float = 0.0
    """(sum w)^2 / (n sum w^2) of the importance weights w = trainer / behaviour, before the first optimiser step."""
    mismatch_kl_by_staleness: Mapping[int, float] = field(default_factory=dict)
    """mismatch_kl of the rows of each staleness, in depths."""
    ratio_by_staleness: Mapping[int, float] = field(default_factory=dict)
    """Mean of w, likewise: near 1 while the behaviour policy covers what the trainer's would say."""
    entropy: float = 0.0
    """Mean over tokens; computed only where the entropy term is on."""
    optimiser_steps: int = 0
    skipped_steps: int = 0
    skipped: str | None = None
    """Why optimiser steps were skipped: no_rows, no_signal, non_finite_loss or non_finite_gradient (the last one's)."""
    skip_reasons: Mapping[str, int] = field(default_factory=dict)
    """Every reason -> how many optimiser steps; no_rows and no_signal stand for the whole batch and count 1. On all ranks of a
    world the same: a step is skipped by all or by none."""
    padding_share: float = 0.0
    """Of the positions that the model computed in this batch's micro batches, those that held no token."""

    @property
    def trained(self) -> bool:
        """Whether the weights may have changed."""
        return self.optimiser_steps > 0


class Learner(Protocol):
    """A policy under training. Not thread-safe: one caller at a time, but what `state` and `checkpoint` return is the caller's.

    A backend is called as (folder, settings, seed), and where several ranks make one learner as (folder, settings, seed, world).
    Every rank then makes the same calls in the same order, each with its own part of the arguments; each call is collective.

    After `restore(checkpoint())`, also in other processes, the same batches give the same weights; bit-exactly on a CPU where the
    layout of the ranks is the same.
    """

    @property
    def place(self) -> Place:
        """Which part of a batch this rank computes on, and with whom. `Place()` where it's alone."""
        ...

    @property
    def step(self) -> int:
        """Optimiser steps taken since entry 0."""
        ...

    @property
    def vocabulary(self) -> int:
        """Token IDs are below it."""
        ...

    def state(self) -> ModelState:
        """The weights in the publish dtype under their canonical Hugging Face names: an independent copy, in host memory.

        Of several ranks each has its own part: over all of them every name stands once, on the rank that publishes it, always
        the same one. Tensors that are split over ranks are joined one at a time, so that no rank needs room for the whole model.
        Copies that must be equal (data parallel ones, norms under tensor parallelism) are compared: `InvariantError` names one
        that isn't.
        """
        ...

    def train(self, batch: TrainBatch) -> StepReport:
        """Train on a batch. A step whose loss or gradient isn't finite leaves the weights alone and is named in the report.

        With `batch.share` the batch holds this rank's rows: order, minibatches and the weights of the mean are those of the whole
        batch (so its gradient is the sum over the ranks), and the report is the whole batch's, the same on every rank.
        """
        ...

    def logprobs(self, tokens: Sequence[int], state: ModelState | None = None) -> list[float]:
        """Of tokens[1:] at temperature 1: under the master weights, or under `state` as a replica would serve it.

        On every rank the same. Of several ranks each gives the part that its own `state()` has just returned; a backend may round
        its weights to the publish dtype instead of reading it.
        """
        ...

    def checkpoint(self) -> dict[str, bytes]:
        """File name -> bytes: weights, optimiser and random state. safetensors and JSON only.

        Of several ranks each has its own files, whose names no other rank has.
        """
        ...

    def restore(self, files: Mapping[str, bytes]) -> None:
        """Take over a checkpoint; `CorruptError` where it isn't this model's, `UsageError` where it's that of ranks laid out in
        a way that this backend can't read. `files` holds every rank's and reads each when it's asked for.
        """
        ...
