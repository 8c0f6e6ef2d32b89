"""How long a sample takes and how many tokens it has, drawn as the synthetic engine and the synthetic agent draw them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from towline.engine.recording import Recording, read_recording
from towline.loadtest.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sample."""

    tokens: int
    """The policy's."""
    tool_seconds: float
    tokens_per_second: float
    """Of its own sequence; 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of one scenario."""

    mean: float
    sigma: float
    lengths: tuple[int, ...]
    most: int
    turns: float
    tool_seconds: float
    tokens_per_second: float
    """Of one sequence; 0: no limit."""
    total_tokens_per_second: float
    failure_rate: float
    recording: Recording | None = None
    """Its groups are drawn whole, instead of all the above but `most` and the total speed."""

    def group(self, size: int, chance: random.Random) -> list[Drawn]:
        """The samples of a group."""
        if self.recording is None:
            return [Drawn(*self._draw(chance), self.tokens_per_second) for _ in range(size)]
        group = self.recording.group_of(chance)
        samples = [self.recording.groups[group][place] for place in self.recording.places(group, size, chance)]
        return [
            Drawn(min(one.policy_tokens, self.most), one.tool_seconds, one.tokens_per_second or self.tokens_per_second)
            for one in samples
        ]

    def seconds(self, drawn: Drawn, slots: int) -> float:
        """Of generation and tools, on a worker whose `slots` are all busy."""
        speeds = [drawn.tokens_per_second, self.total_tokens_per_second / slots]
        speed = min([one for one in speeds if one], default=math.inf)
        return drawn.tokens / speed + drawn.tool_seconds

    def _draw(self, chance: random.Random) -> tuple[int, float]:
        tokens, tools = self._turn(chance), 0.0
        while self.turns and tokens < self.most and chance.random() >= 1 / self.turns:
            tools += chance.lognormvariate(math.log(self.tool_seconds) - 0.5, 1.0) if self.tool_seconds else 0.0
            tokens += self._turn(chance)
        return min(tokens, self.most), tools

    def _turn(self, chance: random.Random) -> int:
        if self.lengths:
            return chance.choice(self.lengths)
        return max(1, round(chance.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)))


def lengths_of(scenario: Scenario, lengths: Sequence[int] = ()) -> Lengths:
    """What the scenario's engines do. A run of real engines says nothing of its lengths: give load.lengths_from then, or
    `[rollout] arguments`."""
    load, arguments = scenario.load, scenario.settings.rollout.arguments
    recording = read_recording(arguments["recorded"]) if "recorded" in arguments else None
    failed = 0.0 if recording is None else recording.failed_share(environment=True) + recording.failed_share(environment=False)
    return Lengths(
        mean=float(arguments.get("mean_tokens", 256.0)),
        sigma=float(arguments.get("sigma", 0.5)),
        lengths=tuple(lengths) or tuple(arguments.get("lengths", ())),
        most=scenario.settings.sampling.max_tokens,
        turns=load.agent_turns,
        tool_seconds=load.tool_seconds,
        tokens_per_second=float(arguments.get("tokens_per_second", 0.0)),
        total_tokens_per_second=float(arguments.get("total_tokens_per_second", 0.0)),
        failure_rate=float(arguments.get("failure_rate", 0.0)) + failed,
        recording=recording,
    )
