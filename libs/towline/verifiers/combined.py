"""A weighted sum of verifiers, each of which stays visible as a component of the reward."""

from __future__ import annotations

from typing import Any

from towline.errors import UsageError
from towline.verifiers.base import Reward, Sample, Verifier, check_reward, load_verifier


class WeightedSum:
    """`parts`: tables with `function`, and optionally `weight` (1), `arguments` and `name` (the function's).

    In TOML:

        [reward]
        function = "towline.verifiers.combined:WeightedSum"
        [[reward.arguments.parts]]
        function = "towline.verifiers.text:numeric_answer"
        [[reward.arguments.parts]]
        function = "towline.verifiers.length:LengthPenalty"
        weight = 0.2
        arguments = { max_tokens = 2048, cache_tokens = 512 }
    """

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        if not parts:
            raise UsageError("reward.arguments.parts is empty; give at least one", code="arguments")
        self._parts: list[tuple[str, float, Verifier]] = []
        for index, part in enumerate(parts):
            setting = f"reward.arguments.parts[{index}]"
            if unknown := set(part) - {"function", "weight", "arguments", "name"}:
                raise UsageError(f"{setting}: unknown key {sorted(unknown)[0]!r}", code="arguments")
            if "function" not in part:
                raise UsageError(f"{setting}: function is missing", code="arguments")
            verifier = load_verifier(part["function"], part.get("arguments"), setting=f"{setting}.function")
            if verifier.is_async:
                raise UsageError(f"{setting}.function is async; only plain functions can be summed", code="arguments")
            name = part.get("name") or part["function"].rpartition(":")[2]
            if name in {other for other, _, _ in self._parts}:
                raise UsageError(f"{setting}: a second part is called {name!r}; give it a name of its own", code="arguments")
            self._parts.append((name, float(part.get("weight", 1.0)), verifier))

    def __call__(self, sample: Sample) -> Reward:
        values = {name: check_reward(verifier.call(sample), verifier.name).value for name, _, verifier in self._parts}
        return Reward(sum(weight * values[name] for name, weight, _ in self._parts), values)
