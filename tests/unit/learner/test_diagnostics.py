"""The mismatch figures against plain sums over tokens, and that parts add up to the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest

from towline.learner.diagnostics import Mismatch, RankSums, decode_sums, encode_sums

RANDOM = np.random.default_rng(4)
LOG_RATIOS = RANDOM.normal(0, 0.7, 200)
STALENESS = RANDOM.integers(0, 4, 200)


def whole() -> Mismatch:
    found = Mismatch()
    found.add(LOG_RATIOS, STALENESS)
    return found


def test_the_figures_are_their_formulas() -> None:
    ratios = [math.exp(d) for d in LOG_RATIOS]
    found = whole()
    assert found.kl == pytest.approx(sum(w - 1 - d for w, d in zip(ratios, LOG_RATIOS, strict=True)) / 200, rel=1e-12)
    assert found.abs_diff == pytest.approx(sum(abs(d) for d in LOG_RATIOS) / 200, rel=1e-12)
    assert found.effective_sample_share == pytest.approx(sum(ratios) ** 2 / (200 * sum(w * w for w in ratios)), rel=1e-12)
    for staleness in range(4):
        rows = [(w, d) for w, d, s in zip(ratios, LOG_RATIOS, STALENESS, strict=True) if s == staleness]
        assert found.ratio_by_staleness[staleness] == pytest.approx(sum(w for w, _ in rows) / len(rows), rel=1e-12)
        assert found.kl_by_staleness[staleness] == pytest.approx(sum(w - 1 - d for w, d in rows) / len(rows), rel=1e-12)


def test_k3_is_the_kl_from_the_behaviour_policy() -> None:
    """Over a distribution's own samples, the mean of w - 1 - log w is KL(behaviour || trainer)."""
    behaviour, trainer = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    tokens = np.repeat([0, 1, 2], (behaviour * 10).astype(int))
    found = Mismatch()
    found.add(np.log(trainer[tokens] / behaviour[tokens]), np.zeros(tokens.size, np.int64))
    assert found.kl == pytest.approx(float((behaviour * np.log(behaviour / trainer)).sum()), rel=1e-12)
    assert found.ratio_by_staleness == {0: pytest.approx(1.0, rel=1e-12)}


def test_parts_of_ranks_add_up() -> None:
    parts = []
    for part in np.array_split(np.arange(200), 3):
        mismatch = Mismatch()
        mismatch.add(LOG_RATIOS[part], STALENESS[part])
        parts.append(decode_sums(encode_sums(RankSums(mismatch=mismatch.plain()))).mismatch)
    merged = Mismatch()
    merged.merge(parts)
    assert merged.kl == pytest.approx(whole().kl, rel=1e-12)
    assert merged.effective_sample_share == pytest.approx(whole().effective_sample_share, rel=1e-12)
    assert merged.ratio_by_staleness == pytest.approx(whole().ratio_by_staleness, rel=1e-12)


def test_nothing_gives_zeros_and_a_far_token_no_infinity() -> None:
    empty = Mismatch()
    assert (empty.kl, empty.abs_diff, empty.effective_sample_share, empty.ratio_by_staleness) == (0.0, 0.0, 0.0, {})
    far = Mismatch()
    far.add(np.array([900.0, -900.0]), np.zeros(2, np.int64))
    assert np.isfinite([far.kl, far.abs_diff, far.effective_sample_share]).all()
