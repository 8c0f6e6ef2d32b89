"""How far simulations are from load tests, and how sure that is.

A load test is one draw: of lengths, and of whatever else the machine did. Each is compared with the simulation of the same seed,
which has the same lengths where the engines are synthetic; what is left differs from run to run, and its spread says how far the
mean difference may be from the true one (Student's t, 95%). Of one load test alone there's no such spread. Then that of
simulations with other seeds stands for both sides', as if the two had nothing in common: an interval that is rather too wide.
The idle share of one load test also has the grain of what is told: a trainer says how long it was idle once a second, and of a
wait when it's over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Literal

from towline.errors import UsageError
from towline.loadtest.result import Result
from towline.loadtest.scenario import Scenario
from towline.simulate.outcome import simulate

CHECKED = (
    "trained_samples_per_second",
    "goodput_tokens_per_second",
    "batches_per_second",
    "staleness.mean",
    "trainer_idle_share",
)
LEVEL = 0.95
LEAST_SEEDS, SEEDS = 5, 16
"""Simulations whose spread is worth something; and as many as are made of it."""
IDLE, IDLE_GRAIN_SECONDS = "trainer_idle_share", 2.0

Metrics = Mapping[str, float]
Verdict = Literal["within", "off", "unsure"]


@dataclass(frozen=True, slots=True)
class Check:
    """One metric, simulated and measured: means over the load tests. `off` is their difference, relative to what was measured;
    that of shares is absolute. The true difference is within `off` +- `margin` by 95%."""

    metric: str
    simulated: float
    measured: float
    off: float
    margin: float

    def verdict(self, bound: float) -> Verdict:
        """Whether the true difference is surely within the bound, surely beyond it, or may be either."""
        if self.off + self.margin <= bound:
            return "within"
        return "off" if self.off - self.margin > bound else "unsure"


def against(scenario: Scenario, measured: Sequence[Result], seeds: int = SEEDS) -> tuple[list[Check], list[Result]]:
    """The scenario's simulations with the load tests' seeds, and how far they are from these. `seeds`: of the spread."""
    made = {seed: simulate(scenario, seed=seed) for seed in dict.fromkeys(one.seed for one in measured)}
    others = []
    if len(measured) == 1:
        others = [simulate(scenario, seed=measured[0].seed + 1 + at).metrics for at in range(max(seeds, LEAST_SEEDS))]
    simulated = [made[one.seed] for one in measured]
    checks = compare([one.metrics for one in simulated], [one.metrics for one in measured], others)
    if not checks:
        raise UsageError(f"a {measured[0].kind} result has nothing that a simulation foretells; give a run's", code="result")
    return checks, simulated


def compare(simulated: Sequence[Metrics], measured: Sequence[Metrics], others: Sequence[Metrics] = ()) -> list[Check]:
    """Pairs of a simulation and a load test of one seed; `others` are simulations of other seeds, which one pair alone needs:
    `LEAST_SEEDS` at least. A metric that one of them lacks is left out."""
    found = []
    for name in CHECKED:
        if not all(name in one for one in (*simulated, *measured)):
            continue
        pairs = [(ours[name], theirs[name]) for ours, theirs in zip(simulated, measured, strict=True)]
        differences = [a - b for a, b in pairs]
        mean = fmean(b for _, b in pairs)
        unit = 1.0 if name.endswith("_share") or not mean else abs(mean)
        if len(pairs) > 1:
            error = student(len(pairs) - 1) * stdev(differences) / math.sqrt(len(pairs))
        elif len(others) < LEAST_SEEDS:
            raise ValueError(f"{len(others)} simulations of other seeds; one load test needs {LEAST_SEEDS}")
        else:
            error = student(len(others) - 1) * stdev(one[name] for one in others) * math.sqrt(2)
            if name == IDLE and (seconds := measured[0].get("measured_seconds")):
                error += IDLE_GRAIN_SECONDS / seconds
        found.append(Check(name, fmean(a for a, _ in pairs), mean, abs(fmean(differences)) / unit, error / unit))
    return found


def student(freedom: int) -> float:
    """Student's t of `freedom` degrees, two-sided `LEVEL`: exact for one and two, else by the normal's and three terms of Cornish
    and Fisher (Abramowitz and Stegun 26.7.5), within 1%."""
    p = (1 + LEVEL) / 2
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
