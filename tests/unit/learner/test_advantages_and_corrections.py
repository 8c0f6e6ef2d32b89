"""Advantages, corrections, penalties and the schedule against plain arithmetic."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch

from towline.learner.advantages.base import by_group
from towline.learner.penalties.entropy import entropy
from towline.learner.penalties.kl import kl_k3
from towline.learner.registry import ADVANTAGES, CORRECTIONS, build, look_up
from towline.learner.schedule import Schedule

GROUPS = np.array([7, 3, 7, 3, 3, 7, 9, 11, 11])
REWARDS = np.array([0.1, 1.0, 0.4, 0.0, 0.25, 1.0, 0.6, 0.5, 0.5])


def plain(name: str, rewards: list[float], i: int) -> float:
    if name == "group_centred":
        return rewards[i] - statistics.fmean(rewards)
    if len(rewards) == 1:
        return 0.0
    if name == "rloo":
        return rewards[i] - statistics.fmean(rewards[:i] + rewards[i + 1 :])
    return (rewards[i] - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-4)


@pytest.mark.parametrize("name", ["group_normalised", "group_centred", "rloo"])
def test_an_advantage_looks_at_its_own_group_alone(name: str) -> None:
    found = by_group(look_up("trainer.advantage", ADVANTAGES, name), GROUPS, REWARDS)
    for row, group in enumerate(GROUPS):
        members = [i for i, other in enumerate(GROUPS) if other == group]
        wanted = plain(name, [float(REWARDS[i]) for i in members], members.index(row))
        assert found[row] == pytest.approx(wanted, abs=1e-12)


def test_equal_rewards_give_no_advantage() -> None:
    for name in ADVANTAGES:
        assert np.all(look_up("trainer.advantage", ADVANTAGES, name)(np.full(8, 0.75)) == 0)


RATIOS = [[0.3, 1.0, 6.0], [0.9], [3.0, 0.1, 1.1, 0.8], [4.0, 2.0]]
LENGTHS = [len(row) for row in RATIOS]


def weight(name: str, ratio: float, row: list[float]) -> float:
    mean = math.prod(row) ** (1 / len(row))
    return {
        "none": 1.0,
        "tis": min(ratio, 2.0),
        "icepop": ratio if 0.5 <= ratio <= 5.0 else 0.0,
        "mask": 1.0 if 0.5 <= ratio <= 5.0 else 0.0,
        "sequence_mask": 1.0 if 0.5 <= mean <= 2.0 else 0.0,
    }[name]


@pytest.mark.parametrize("name", ["none", "tis", "icepop", "mask", "sequence_mask"])
def test_a_correction_weighs_each_token_as_its_formula_says(name: str) -> None:
    correction = build("trainer.correction", CORRECTIONS, name, {})
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    rows = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths.long())
    log_ratio = torch.tensor([math.log(ratio) for row in RATIOS for ratio in row], dtype=torch.float64)
    wanted = [weight(name, ratio, row) for row in RATIOS for ratio in row]
    assert len(set(wanted)) > 1 or name == "none"
    np.testing.assert_allclose(correction(log_ratio, rows, lengths).numpy(), wanted, rtol=1e-9)
    assert correction.needs_proximal == (name != "none")


def test_kl_is_unbiased_and_its_gradient_right() -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = sum(p * math.log(p / q) for p, q in zip([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], strict=True))
    leaf = policy.log().requires_grad_()
    values = kl_k3(leaf, reference.log())
    assert float((policy * values.detach()).sum()) == pytest.approx(exact, rel=1e-9)
    values.sum().backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(leaf.grad.numpy(), [1 - q / p for p, q in zip([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], strict=True)])


def test_entropy_is_that_of_the_distribution() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    weights = [math.exp(x) for x in (2.0, 1.0, 0.0, -1.0)]
    shares = [w / sum(weights) for w in weights]
    wanted = [math.log(4), -sum(p * math.log(p) for p in shares)]
    np.testing.assert_allclose(entropy(torch.log_softmax(logits, -1)).numpy(), wanted, rtol=1e-9)


def test_the_gradient_of_entropy_is_its_formula() -> None:
    """dH/dz_j = -p_j (log p_j + H), with p = softmax(z)."""
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.1], [1.0, 1.5, -2.0, 0.0]], dtype=torch.float64, requires_grad=True)
    entropy(torch.log_softmax(logits, -1)).sum().backward()
    wanted = []
    for row in logits.tolist():
        total = sum(math.exp(z) for z in row)
        shares = [math.exp(z) / total for z in row]
        whole = -sum(p * math.log(p) for p in shares)
        wanted.append([-p * (math.log(p) + whole) for p in shares])
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy(), wanted, rtol=1e-9)


@pytest.mark.parametrize(
    ("depth", "wanted"),
    [(1, 5e-4 * 0.1 * (1 - 0.8 * 0.01)), (10, 5e-4 * (1 - 0.8 * 0.1)), (50, 5e-4 * 0.6), (100, 1e-4), (150, 1e-4)],
)
def test_the_schedule_warms_up_and_decays_linearly(depth: int, wanted: float) -> None:
    assert Schedule(5e-4, 10, 100, 0.2).at(depth) == pytest.approx(wanted)


def test_no_warm_up_starts_at_the_peak() -> None:
    assert Schedule(1e-3, 0, 10, 1.0).at(1) == 1e-3


def test_a_correction_by_import_path_is_taken() -> None:
    correction: Any = build(
        "trainer.correction", CORRECTIONS, "towline.learner.corrections.tis:TruncatedImportanceSampling", {"cap": 3}
    )
    assert correction.cap == 3
