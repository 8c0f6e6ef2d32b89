"""How far the trainer's policy is from the one that sampled, in sums that micro batches and ranks add up to.

With d = log(pi_trainer / pi_behaviour) of a policy token and w = e^d, over the tokens of a batch before its first optimiser step:
mismatch KL is the mean of w - 1 - d, the k3 estimator of KL(behaviour || trainer) (Schulman 2020, "Approximating KL divergence");
the effective sample share is (sum w)^2 / (n sum w^2) (Kong 1992). d is bounded to +-20 where it's exponentiated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

MAX_LOG_RATIO = 20.0
_TOKENS, _ABS, _K3, _RATIO, _SQUARE = range(5)
_FIELDS = 5


@dataclass(slots=True)
class Mismatch:
    """Staleness in depths -> f64[5]: tokens, and the sums of |d|, w - 1 - d, w and w^2 over them."""

    sums: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)

    def add(self, log_ratios: npt.NDArray[np.float64], staleness: npt.NDArray[np.int64]) -> None:
        """N tokens: `log_ratios` f64[N] are d, `staleness` i64[N] is the row's at each of its tokens."""
        ratios = np.exp(np.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        terms = np.stack([np.ones_like(ratios), np.abs(log_ratios), ratios - 1.0 - log_ratios, ratios, ratios**2])
        for value in np.unique(staleness):
            self._add(int(value), terms[:, staleness == value].sum(1))

    def merge(self, others: Sequence[Mapping[int, Sequence[float]]]) -> None:
        """Add what `plain` gave on other ranks."""
        for other in others:
            for staleness, sums in other.items():
                self._add(staleness, np.array(sums, np.float64))

    def plain(self) -> dict[int, list[float]]:
        return {staleness: sums.tolist() for staleness, sums in self.sums.items()}

    @property
    def kl(self) -> float:
        return self._mean(_K3)

    @property
    def abs_diff(self) -> float:
        return self._mean(_ABS)

    @property
    def effective_sample_share(self) -> float:
        total = self._total()
        return float(total[_RATIO] ** 2 / (total[_TOKENS] * total[_SQUARE])) if total[_TOKENS] else 0.0

    @property
    def kl_by_staleness(self) -> dict[int, float]:
        return {staleness: float(sums[_K3] / sums[_TOKENS]) for staleness, sums in sorted(self.sums.items())}

    @property
    def ratio_by_staleness(self) -> dict[int, float]:
        """Mean w."""
        return {staleness: float(sums[_RATIO] / sums[_TOKENS]) for staleness, sums in sorted(self.sums.items())}

    def _add(self, staleness: int, sums: npt.NDArray[np.float64]) -> None:
        self.sums[staleness] = self.sums.get(staleness, np.zeros(_FIELDS)) + sums

    def _total(self) -> npt.NDArray[np.float64]:
        return np.asarray(sum(self.sums.values(), np.zeros(_FIELDS)))

    def _mean(self, which: int) -> float:
        total = self._total()
        return float(total[which] / total[_TOKENS]) if total[_TOKENS] else 0.0


class RankSums(msgspec.Struct, kw_only=True):
    """One rank's part of a batch's report."""

    tokens: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    entropy: float = 0.0
    positions: int = 0
    """That the model computed."""
    filled: int = 0
    """Of those, with a token."""
    mismatch: dict[int, list[float]] = {}


_decoder = msgspec.json.Decoder(RankSums)


def encode_sums(sums: RankSums) -> bytes:
    return msgspec.json.encode(sums)


def decode_sums(data: bytes) -> RankSums:
    return _decoder.decode(data)
