"""`towline loadtest compare A B`: which metrics changed by more than their noise.

Each metric has one value a repetition. Two sides differ where both the exact Mann-Whitney test (two-sided, ties by the mid rank)
and the bootstrap interval of the ratio of medians say so. With too few repetitions for the test to ever say so (3 against 3
reach p = 0.1, 4 against 4 p = 0.029), nothing is called a change: the differences are shown, and that they may be noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from towline.loadtest.result import Result

LEVEL = 0.05
EXACT_LIMIT = 20_000
"""Ways of dealing the values to two sides that are counted out; beyond, so many are drawn."""
DRAWS = 4000
SETTLED = 0.02
"""A median that moved by less isn't told, however sure it is."""
HIDDEN = (".count", ".max", ".p99.9", ".p90", "rss.", "hop.generate")
"""Names that a reader rarely asks for; they're compared where `all_of_them`."""


@dataclass(frozen=True, slots=True)
class Change:
    metric: str
    before: float
    after: float
    """Medians."""
    ratio: float
    low: float
    high: float
    """The bootstrap's 95 % interval of the ratio."""
    p: float
    verdict: Literal["changed", "noise", "unknown"]
    """unknown: too few repetitions for any verdict."""


@dataclass(slots=True)
class Comparison:
    before: str
    after: str
    repetitions: tuple[int, int]
    changes: list[Change] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        found = [f"A {self.before}", f"B {self.after}", *[f"note: {text}" for text in self.warnings]]
        told = [one for one in self.changes if one.verdict == "changed"]
        unsure = [one for one in self.changes if one.verdict == "unknown" and abs(one.ratio - 1) >= SETTLED]
        if told:
            found += ["changed beyond noise:", *map(_line, told)]
        elif not unsure:
            found.append("nothing changed beyond noise")
        if unsure:
            found += [f"too few repetitions to tell from noise ({self.repetitions[0]} and {self.repetitions[1]}; 4 a side can):"]
            found += map(_line, unsure)
        return found


def _line(one: Change) -> str:
    return (
        f"  {one.metric:<48} {one.before:>12.5g} -> {one.after:<12.5g} x{one.ratio:.3f} [{one.low:.3f}, {one.high:.3f}]"
        f"  p = {one.p:.3g}"
    )


def compare(before: Sequence[Result], after: Sequence[Result], *, all_of_them: bool = False) -> Comparison:
    """Both sides of one scenario and configuration, or the notes say what else differs."""
    found = Comparison(_title(before), _title(after), (len(before), len(after)))
    found.warnings = _warnings(before[0], after[0])
    names = sorted(set.intersection(*(set(result.metrics) for result in (*before, *after))))
    for name in names:
        if not all_of_them and any(name.endswith(part) or name.startswith(part) for part in HIDDEN):
            continue
        a, b = (np.array([result.metrics[name] for result in side]) for side in (before, after))
        change = judge(name, a, b)
        if change is not None:
            found.changes.append(change)
    found.changes.sort(key=lambda one: (one.verdict != "changed", -abs(math.log(max(one.ratio, 1e-9)))))
    return found


def judge(name: str, a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> Change | None:
    """None where there is nothing to compare: both medians are 0."""
    x, y = float(np.median(a)), float(np.median(b))
    if x == y == 0:
        return None
    ratio = y / x if x else math.inf
    p = mann_whitney(a, b)
    low, high = _interval(a, b)
    least = 2 / math.comb(a.size + b.size, a.size)
    if least > LEVEL:
        verdict: Literal["changed", "noise", "unknown"] = "unknown" if x != y else "noise"
    else:
        sure = p <= LEVEL and not low <= 1 <= high and abs(ratio - 1) >= SETTLED
        verdict = "changed" if sure else "noise"
    return Change(name, x, y, ratio if math.isfinite(ratio) else 1e9, low, high, p, verdict)


def mann_whitney(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Two-sided p by counting out every way of dealing the joined ranks to the two sides (drawn where they're too many)."""
    joined = np.concatenate([a, b])
    ranks = _mid_ranks(joined)
    mean = ranks.sum() * a.size / joined.size
    seen = abs(ranks[: a.size].sum() - mean) - 1e-9
    if math.comb(joined.size, a.size) <= EXACT_LIMIT:
        sums = np.array([ranks[list(places)].sum() for places in combinations(range(joined.size), a.size)])
        return float((np.abs(sums - mean) >= seen).mean())
    chance = np.random.default_rng(0)
    sums = np.array([chance.permutation(ranks)[: a.size].sum() for _ in range(EXACT_LIMIT)])
    return float((1 + (np.abs(sums - mean) >= seen).sum()) / (1 + EXACT_LIMIT))


def _mid_ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse], np.float64)


def _interval(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The percentile bootstrap's 95 % interval of the ratio of medians."""
    chance = np.random.default_rng(0)
    x = np.median(chance.choice(a, (DRAWS, a.size)), axis=1)
    y = np.median(chance.choice(b, (DRAWS, b.size)), axis=1)
    ratios = y / np.where(x == 0, np.nan, x)
    ratios = ratios[np.isfinite(ratios)]
    if not ratios.size:
        return 0.0, 1e9
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def _title(results: Sequence[Result]) -> str:
    first = results[0]
    return f"{first.scenario} at {first.commit}, {len(results)} repetition{'s' if len(results) > 1 else ''}"


def _warnings(a: Result, b: Result) -> list[str]:
    found = []
    if a.scenario != b.scenario:
        found.append(f"the scenarios differ: {a.scenario} and {b.scenario}")
    for name in ("cpu", "cores", "memory_bytes"):
        if a.machine.get(name) != b.machine.get(name):
            found.append(f"the machines differ: {name} {a.machine.get(name)} and {b.machine.get(name)}")
    for what in ("settings", "load"):
        left, right = _flat(getattr(a, what)), _flat(getattr(b, what))
        for key in sorted(left.keys() | right.keys()):
            if left.get(key) != right.get(key) and key not in (
                "run.name",
                "run.directory",
                "bus.url",
                "store.url",
                "store.endpoint",
            ):
                found.append(f"{key}: {left.get(key)} and {right.get(key)}")
    return found


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
