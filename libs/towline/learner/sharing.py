"""Which rank computes on which rows of a batch: decided from the batch record alone, before anything is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from towline.learner.world import World


@dataclass(frozen=True, slots=True)
class Place:
    """A rank among those that split a batch: part `index` of `count`. The ranks of `peers` have the same part (tensor and
    pipeline parallel ranks of one model); `peers.rank == 0` is the one that fetches its rows."""

    index: int = 0
    count: int = 1
    peers: World = field(default_factory=World)

    @property
    def leads(self) -> bool:
        return self.peers.rank == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's rows of a batch of R rows, and what it must know of the others' for global means and one common order."""

    mine: npt.NDArray[np.int64]
    """[r] the whole batch's row number of each row at hand, ascending."""
    advantages: npt.NDArray[np.float32]
    """[R]"""
    policy_tokens: npt.NDArray[np.int64]
    """[R]"""

    def local(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of these rows of the whole batch, those at hand, as numbers of the rows at hand; in the order of `rows`."""
        return np.searchsorted(self.mine, rows[np.isin(rows, self.mine)])


def divide(tokens: Sequence[int], count: int) -> list[npt.NDArray[np.int64]]:
    """The rows of each of `count` parts, ascending: about as many rows and as many tokens in each.

    Longest first, back and forth over the parts. Equal on every rank, since it depends on the record alone.
    """
    order = np.argsort(-np.asarray(tokens, np.int64), kind="stable")
    turns = np.arange(order.size) % (2 * count)
    part = np.where(turns < count, turns, 2 * count - 1 - turns)
    return [np.sort(order[part == index]) for index in range(count)]
