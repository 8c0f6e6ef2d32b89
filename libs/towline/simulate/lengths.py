"""How long a sample takes and how many tokens it has, drawn as the synthetic engine and the synthetic agent draw them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from towline.loadtest.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of one scenario. `draw` gives (policy tokens, seconds of tools) of a sample."""

    mean: float
    sigma: float
    recorded: tuple[int, ...]
    most: int
    turns: float
    tool_seconds: float
    tokens_per_second: float
    """Of one sequence; 0: no limit."""
    total_tokens_per_second: float
    failure_rate: float

    def draw(self, chance: random.Random) -> tuple[int, float]:
        tokens, tools = self._turn(chance), 0.0
        while self.turns and tokens < self.most and chance.random() >= 1 / self.turns:
            tools += chance.lognormvariate(math.log(self.tool_seconds) - 0.5, 1.0) if self.tool_seconds else 0.0
            tokens += self._turn(chance)
        return min(tokens, self.most), tools

    def seconds(self, tokens: int, slots: int) -> float:
        """Of generation, on a worker whose `slots` are all busy."""
        speeds = [self.tokens_per_second, self.total_tokens_per_second / slots]
        speed = min([one for one in speeds if one], default=math.inf)
        return tokens / speed

    def _turn(self, chance: random.Random) -> int:
        if self.recorded:
            return chance.choice(self.recorded)
        return max(1, round(chance.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)))


def lengths_of(scenario: Scenario, recorded: Sequence[int] = ()) -> Lengths:
    """What the scenario's engines do. A run of real engines says nothing of its lengths: give `[rollout] arguments` then."""
    load, arguments = scenario.load, scenario.settings.rollout.arguments
    return Lengths(
        mean=float(arguments.get("mean_tokens", 256.0)),
        sigma=float(arguments.get("sigma", 0.5)),
        recorded=tuple(recorded) or tuple(arguments.get("lengths", ())),
        most=scenario.settings.sampling.max_tokens,
        turns=load.agent_turns,
        tool_seconds=load.tool_seconds,
        tokens_per_second=float(arguments.get("tokens_per_second", 0.0)),
        total_tokens_per_second=float(arguments.get("total_tokens_per_second", 0.0)),
        failure_rate=float(arguments.get("failure_rate", 0.0)),
    )
