"""Every loss against a plain one-token-at-a-time reference: its value over a minibatch, its gradient, what it calls clipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from towline.errors import UsageError
from towline.learner.losses.base import LossInputs
from towline.learner.registry import LOSSES, build

LENGTHS = [3, 1, 4, 2]
ROWS_IN_ALL = 6
"""Two more rows had no signal and were left out."""
Rows = list[list[float]]


def draw(seed: int) -> tuple[Rows, Rows, Rows, list[float]]:
    """New, old and behaviour logprobs by row and token, and advantages; ratios far outside and inside every clip range."""
    random = np.random.default_rng(seed)
    new = [list(-random.exponential(1.0, n)) for n in LENGTHS]
    old = [[value + random.normal(0, 0.6) for value in row] for row in new]
    behaviour = [[value + random.normal(0, 0.8) for value in row] for row in old]
    return new, old, behaviour, [1.3, -0.7, -2.0, 0.4]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def each_token(new: Rows, old: Rows, behaviour: Rows, advantages: list[float], value: Callable[..., float]) -> Rows:
    return [
        [value(n, o, b, advantage) for n, o, b in zip(*rows, strict=True)]
        for *rows, advantage in zip(new, old, behaviour, advantages, strict=True)
    ]


def mean_of_tokens(values: Rows) -> float:
    return sum(map(sum, values)) / sum(LENGTHS)


def mean_of_rows(values: Rows) -> float:
    return sum(sum(row) / len(row) for row in values) / ROWS_IN_ALL


def grpo(new: Rows, old: Rows, behaviour: Rows, advantages: list[float], base: Rows) -> float:
    return mean_of_tokens(
        each_token(new, old, behaviour, advantages, lambda n, o, b, a: surrogate(math.exp(n - o), a, 0.2, 0.28))
    )


def grpo_sequence(new: Rows, old: Rows, behaviour: Rows, advantages: list[float], base: Rows) -> float:
    return mean_of_rows(each_token(new, old, behaviour, advantages, lambda n, o, b, a: surrogate(math.exp(n - o), a, 0.1, 0.3)))


def dr_grpo(new: Rows, old: Rows, behaviour: Rows, advantages: list[float], base: Rows) -> float:
    values = each_token(new, old, behaviour, advantages, lambda n, o, b, a: surrogate(math.exp(n - o), a, 0.2, 0.2))
    return sum(map(sum, values)) / (ROWS_IN_ALL * 7)


def gspo(new: Rows, old: Rows, behaviour: Rows, advantages: list[float], base: Rows) -> float:
    total = 0.0
    for n, o, a in zip(new, old, advantages, strict=True):
        ratio = math.prod(math.exp(x - y) for x, y in zip(n, o, strict=True)) ** (1 / len(n))
        total += surrogate(ratio, a, 0.25, 0.3)
    return total / ROWS_IN_ALL


def cispo(new: Rows, old: Rows, behaviour: Rows, advantages: list[float], base: Rows) -> float:
    # `base` is the point at which the gradient is taken: the weight is frozen there.
    total = 0.0
    for n, at, o, a in zip(new, base, old, advantages, strict=True):
        total += sum(-clip(math.exp(y - z), 0.7, 1.5) * a * x for x, y, z in zip(n, at, o, strict=True))
    return total / sum(LENGTHS)


def ppo_clip(new: Rows, old: Rows, behaviour: Rows, advantages: list[float], base: Rows) -> float:
    def value(n: float, o: float, b: float, a: float) -> float:
        result = surrogate(math.exp(n - o), a, 0.2, 0.2)
        return min(result, -1.5 * a) if a < 0 else result

    return mean_of_tokens(each_token(new, old, behaviour, advantages, value))


def decoupled_ppo(new: Rows, old: Rows, behaviour: Rows, advantages: list[float], base: Rows) -> float:
    def value(n: float, o: float, b: float, a: float) -> float:
        return min(math.exp(o - b), 1.8) * surrogate(math.exp(n - o), a, 0.2, 0.2)

    return mean_of_tokens(each_token(new, old, behaviour, advantages, value))


CASES = [
    ("grpo", {}, grpo),
    ("grpo", {"clip_low": 0.1, "clip_high": 0.3, "mean": "sequence"}, grpo_sequence),
    ("dr_grpo", {"max_tokens": 7}, dr_grpo),
    ("gspo", {"clip_low": 0.25, "clip_high": 0.3}, gspo),
    ("cispo", {"clip_low": 0.3, "clip_high": 0.5}, cispo),
    ("ppo_clip", {"dual_clip": 1.5}, ppo_clip),
    ("decoupled_ppo", {"weight_cap": 1.8}, decoupled_ppo),
]


def flat(rows: Rows) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def loss_of(name: str, arguments: dict[str, Any], seed: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The minibatch's loss, the leaf that holds the new logprobs, and the terms."""
    new, old, behaviour, advantages = draw(seed)
    loss = build("trainer.loss", LOSSES, name, arguments)
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    rows = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths.long())
    leaf = flat(new).requires_grad_()
    terms = loss(
        LossInputs(
            logprobs=leaf,
            old=flat(old),
            behaviour=flat(behaviour),
            advantages=torch.tensor(advantages, dtype=torch.float64)[rows],
            rows=rows,
            lengths=lengths,
        )
    )
    return (terms.values * loss.row_weights(lengths, float(ROWS_IN_ALL))[rows]).sum(), leaf, terms


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "arguments", "reference"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_value_and_gradient_are_the_formulas(name: str, arguments: dict[str, Any], reference: Any, seed: int) -> None:
    new, old, behaviour, advantages = draw(seed)
    total, leaf, _ = loss_of(name, arguments, seed)
    assert float(total.detach()) == pytest.approx(reference(new, old, behaviour, advantages, new), rel=1e-9)
    total.backward()
    h, wanted = 1e-6, []
    for r, row in enumerate(new):
        for t in range(len(row)):
            sides = []
            for sign in (1, -1):
                moved = [list(values) for values in new]
                moved[r][t] += sign * h
                sides.append(reference(moved, old, behaviour, advantages, new))
            wanted.append((sides[0] - sides[1]) / (2 * h))
    assert leaf.grad is not None
    np.testing.assert_allclose(leaf.grad.numpy(), wanted, atol=1e-7)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "ppo_clip", "decoupled_ppo"])
def test_clipped_tokens_are_those_without_a_gradient(name: str) -> None:
    arguments = {"max_tokens": 7} if name == "dr_grpo" else {}
    total, leaf, terms = loss_of(name, arguments, 1)
    total.backward()
    clipped = terms.clipped_low | terms.clipped_high
    assert bool(clipped.any())
    assert not bool(clipped.all())
    assert leaf.grad is not None
    assert torch.equal(leaf.grad == 0, clipped)


BOUNDS = [
    ("grpo", {}, 0.2, 0.28), ("dr_grpo", {"max_tokens": 7}, 0.2, 0.2), ("ppo_clip", {"clip": 0.3}, 0.3, 0.3),
    ("decoupled_ppo", {}, 0.2, 0.2), ("cispo", {"clip_low": 0.3, "clip_high": 0.5}, 0.3, 0.5),
    ("gspo", {"clip_low": 0.25, "clip_high": 0.3}, 0.25, 0.3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "low", "high"), BOUNDS, ids=[case[0] for case in BOUNDS])
@pytest.mark.parametrize("seed", range(3))
def test_low_and_high_are_told_apart(name: str, arguments: dict[str, Any], low: float, high: float, seed: int) -> None:
    """Below 1 - low where the advantage pushes the ratio down, above 1 + high where it pushes it up; CISPO's on either side."""
    new, old, _, advantages = draw(seed)
    below, above = [], []
    for n, o, a in zip(new, old, advantages, strict=True):
        ratios = [math.exp(x - y) for x, y in zip(n, o, strict=True)]
        if name == "gspo":
            ratios = [math.prod(ratios) ** (1 / len(ratios))] * len(ratios)
        below += [r < 1 - low and (a < 0 or name == "cispo") for r in ratios]
        above += [r > 1 + high and (a > 0 or name == "cispo") for r in ratios]
    _, _, terms = loss_of(name, arguments, seed)
    assert terms.clipped_low.tolist() == below
    assert terms.clipped_high.tolist() == above


def test_a_huge_ratio_keeps_the_gradient_finite() -> None:
    loss = build("trainer.loss", LOSSES, "grpo", {})
    leaf = torch.tensor([0.0], requires_grad=True)
    one = torch.ones(1)
    terms = loss(
        LossInputs(
            logprobs=leaf, old=torch.tensor([-1000.0]), behaviour=torch.tensor([-1000.0]), advantages=one,
            rows=torch.zeros(1, dtype=torch.int64), lengths=one,
        )
    )  # fmt: skip
    terms.values.sum().backward()
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()


def test_wrong_names_and_arguments_are_refused_with_the_setting() -> None:
    with pytest.raises(UsageError, match=r"trainer\.loss = 'gpro': use grpo, dr_grpo"):
        build("trainer.loss", LOSSES, "gpro", {})
    with pytest.raises(UsageError, match=r"trainer\.loss = 'dr_grpo'.*max_tokens"):
        build("trainer.loss", LOSSES, "dr_grpo", {})
    with pytest.raises(UsageError, match="use token or sequence"):
        build("trainer.loss", LOSSES, "grpo", {"mean": "batch"})
    with pytest.raises(UsageError, match="no module"):
        build("trainer.loss", LOSSES, "nowhere_at_all:Loss", {})
