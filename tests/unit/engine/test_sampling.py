"""Uniform numbers are splitmix64's, and draws follow the distribution that the sampling parameters leave."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from towline.engine.sampling import seed_word, uniforms
from towline.engine.torch_sampling import SamplingPlan, draw

MASK = (1 << 64) - 1
CPU = torch.device("cpu")


def mix(word: int) -> int:
    """The finaliser of splitmix64 in unbounded integers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def plan(rows: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, vocabulary: int = 40) -> SamplingPlan:
    return SamplingPlan.of(
        np.full(rows, temperature, np.float32), np.full(rows, top_k), np.full(rows, top_p, np.float32),
        vocabulary=vocabulary, device=CPU,
    )  # fmt: skip


def test_uniform_numbers_are_splitmix64_of_the_mixed_seed() -> None:
    seeds, positions = [0, 1, 2**63 + 5, -7], [0, 1, 41, 100_000]
    got = uniforms(np.array([seed_word(s) for s in seeds]), np.array(positions))
    want = [
        (mix((mix(s & MASK) + (i + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11) / 2**53 for s, i in zip(seeds, positions, strict=True)
    ]
    assert got.tolist() == want
    # Vigna's splitmix64.c seeded with 0 gives this first number; 0 mixes to 0.
    assert got[0] == (0xE220A8397B1DCDAF >> 11) / 2**53


def test_uniform_numbers_are_uniform_and_uncorrelated_over_seeds_and_positions() -> None:
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
    numbers = uniforms(seeds, positions)
    counts = np.histogram(numbers, 50, (0, 1))[0]
    assert ((counts - 800) ** 2 / 800).sum() < 100  # chi-square, 49 degrees of freedom: p < 1e-5
    for axis in (0, 1):
        a, b = (numbers[:-1], numbers[1:]) if axis == 0 else (numbers[:, :-1], numbers[:, 1:])
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (12, 0.8)])
def test_draws_follow_the_distribution_that_hugging_face_s_warpers_leave(top_k: int, top_p: float) -> None:
    torch.manual_seed(3)
    rows, temperature = 40_000, 0.8
    logits = torch.randn(1, 40) * 2
    warped = logits / temperature
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    expected = torch.softmax(warped, -1)[0].numpy()
    uniform = torch.from_numpy(uniforms(np.arange(rows, dtype=np.uint64), np.zeros(rows, np.int64)))
    tokens, logprobs = draw(logits.expand(rows, -1), plan(rows, temperature=temperature, top_k=top_k, top_p=top_p), uniform)
    counts = np.bincount(tokens.numpy(), minlength=40)
    assert (counts[expected == 0] == 0).all()
    likely = expected * rows > 5
    chi_square = ((counts - expected * rows)[likely] ** 2 / (expected * rows)[likely]).sum()
    assert chi_square < 3 * likely.sum() + 20
    before = torch.log_softmax(logits / temperature, -1)[0]
    torch.testing.assert_close(logprobs, before[tokens], rtol=0, atol=1e-6)


def test_temperature_zero_takes_the_likeliest_token_at_its_logprob() -> None:
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = draw(logits, plan(64, temperature=0.0), torch.full((64,), 0.999999, dtype=torch.float64))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).max(-1).values)


def test_the_ends_of_the_unit_interval_draw_tokens_that_have_a_share() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]]).expand(2, -1)
    tokens, logprobs = draw(logits, plan(2, vocabulary=5), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 3]
    assert torch.isfinite(logprobs).all()
