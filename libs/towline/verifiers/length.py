"""Rewards from how long a response is, and whether it came to its own end."""

from __future__ import annotations

from typing import Any

from towline.errors import UsageError
from towline.verifiers.base import Reward, Sample, check_reward, load_verifier


def finished(sample: Sample) -> float:
    """1 where the policy ended its response itself, 0 where it was cut off."""
    return float(sample.finish == "stop")


class LengthPenalty:
    """0 up to `max_tokens - cache_tokens` policy tokens, then linearly down to -1 at `max_tokens`, -1 beyond.

    The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).
    """

    def __init__(self, max_tokens: int, cache_tokens: int) -> None:
        if not 0 < cache_tokens <= max_tokens:
            raise UsageError(f"cache_tokens = {cache_tokens}: use 1 to max_tokens ({max_tokens})", code="arguments")
        self._max_tokens, self._cache_tokens = max_tokens, cache_tokens

    def __call__(self, sample: Sample) -> float:
        over = sample.policy_tokens - (self._max_tokens - self._cache_tokens)
        return -min(max(over / self._cache_tokens, 0.0), 1.0)


class ShorterIsBetter:
    """Scope `group`: a sample verifier's reward, plus `weight` times a length reward that compares within the group.

    The length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3): lambda = 0.5 - (length - shortest) / (longest -
    shortest); right samples (reward >= `right_from`) get lambda, wrong ones min(0, lambda); 0 where all are equally long.
    """

    def __init__(
        self, function: str, arguments: dict[str, Any] | None = None, *, weight: float = 0.1, right_from: float = 1.0
    ) -> None:
        self._verifier = load_verifier(function, arguments, setting="reward.arguments.function")
        if self._verifier.is_async:
            raise UsageError(f"reward.arguments.function = {function!r} is async; use a plain function here", code="arguments")
        self._weight, self._right_from = weight, right_from

    def __call__(self, group: list[Sample]) -> list[Reward]:
        lengths = [sample.policy_tokens for sample in group]
        shortest, spread = min(lengths), max(lengths) - min(lengths)
        rewards = []
        for sample, length in zip(group, lengths, strict=True):
            own = check_reward(self._verifier.call(sample), self._verifier.name)
            ranked = 0.5 - (length - shortest) / spread if spread else 0.0
            if own.value < self._right_from:
                ranked = min(0.0, ranked)
            rewards.append(Reward(own.value + self._weight * ranked, own.components | {"task": own.value, "length": ranked}))
        return rewards
