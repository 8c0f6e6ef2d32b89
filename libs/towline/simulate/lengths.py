"""How long a sample takes and how many tokens it has, drawn as the synthetic engine and the synthetic agent draw them.

Those of a run follow from its seed: group 7 of the simulation has the lengths that group 7 of a load test with that `run.seed`
has, so that the two can be compared without the noise of different draws. Not so a recording's, which the run's name decides.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from towline.contract.task import TRAIN
from towline.engine.recording import Recording, read_recording
from towline.loadtest.scenario import Scenario
from towline.loadtest.task import VOCABULARY


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
    tool_tokens: int
    tokens_per_second: float
    """Of one sequence; 0: no limit."""
    total_tokens_per_second: float
    failure_rate: float
    recording: Recording | None = None
    """Its groups are drawn whole, instead of all the above but `most` and the total speed."""

    def group(self, number: int, size: int, seed: int) -> list[Drawn]:
        """The samples of the run's group of this number."""
        if self.recording is None:
            return [Drawn(*self._draw(_task_seed(seed, number, sample)), self.tokens_per_second) for sample in range(size)]
        chance = random.Random(f"recorded/{seed}/{number}")
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

    def _draw(self, seed: int) -> tuple[int, float]:
        """Policy tokens and the tools' seconds of the task with this seed."""
        agent, turn, seconds = random.Random(f"agent/{seed}"), 1, 0.0
        tokens = self._turn(seed, 0)
        while self.turns and tokens < self.most and agent.random() >= 1 / self.turns:
            seconds += agent.lognormvariate(math.log(self.tool_seconds) - 0.5, 1.0) if self.tool_seconds else 0.0
            for _ in range(self.tool_tokens):
                agent.randrange(1, VOCABULARY)
            tokens, turn = tokens + self._turn(seed, turn), turn + 1
        return min(tokens, self.most), seconds

    def _turn(self, seed: int, number: int) -> int:
        chance = random.Random(f"{seed}/{number}")
        drawn = chance.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return max(1, chance.choice(self.lengths) if self.lengths else round(drawn))


def _task_seed(seed: int, group: int, sample: int) -> int:
    """The buffer's, of a sample of lane train."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{TRAIN}/{group}/{sample}".encode()) >> 1


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
        tool_tokens=load.tool_tokens,
        tokens_per_second=float(arguments.get("tokens_per_second", 0.0)),
        total_tokens_per_second=float(arguments.get("total_tokens_per_second", 0.0)),
        failure_rate=float(arguments.get("failure_rate", 0.0)) + failed,
        recording=recording,
    )
