"""`towline loadtest compare A B`: which metrics changed by more than their noise.

Each metric has one value a repetition. Two sides differ where both the exact Mann-Whitney test (two-sided, ties by the mid rank)
and the bootstrap interval of the ratio of medians say so. Among so many metrics chance alone would make some differ, so p is
corrected for their number (Benjamini and Hochberg, 1995) in two families: the figures that are asked for first, and the others.
With too few repetitions for the test to ever say so (3 against 3 reach p = 0.1, 4 against 4 p = 0.029), nothing is called a
change: the differences are shown, and that they may be noise. Six a side can tell one figure alone, five only several together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import combinations
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from towline.loadtest.result import Result
from towline.loadtest.text import ASKED

LEVEL = 0.05
"""Of a corrected p: where nothing changed, the share of comparisons in which a family names anything at all."""
EXACT_LIMIT = 20_000
"""Ways of dealing the values to two sides that are counted out; beyond, so many are drawn."""
DRAWS = 4000
SETTLED = 0.02
"""A median that moved by less isn't told, however sure it is."""
HIDDEN = (".count", ".max", ".p99.9", ".p90", "rss.", "hop.generate")
"""Names that a reader rarely asks for; they're compared where `all_of_them`."""
OWN = frozenset(("run.name", "run.directory", "bus.url", "store.url", "store.endpoint"))
"""Settings that differ from run to run whatever is compared."""
FIRST = frozenset(name for name, _, _ in ASKED)
LOADS_APART = (2.0, 1.5)
"""Between the sides' load averages before a run: by so much, and by such a factor, another machine."""


Verdict = Literal["changed", "noise", "unknown"]


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
    """Of this metric alone."""
    verdict: Verdict
    """unknown: too few repetitions for any verdict."""
    q: float = 1.0
    """p as it's corrected for the number of metrics that were looked at."""


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
            found += [f"too few repetitions to tell from noise ({self.repetitions[0]} and {self.repetitions[1]}; 6 a side can):"]
            found += map(_line, unsure)
        return found


def _line(one: Change) -> str:
    ratio = "from none" if one.before == 0 else f"x{one.ratio:.3f} [{one.low:.3f}, {one.high:.3f}]"
    return f"  {one.metric:<44} {one.before:>10.5g} -> {one.after:<10.5g} {ratio}  q = {one.q:.2g}"


def compare(before: Sequence[Result], after: Sequence[Result], *, all_of_them: bool = False) -> Comparison:
    """Both sides of one scenario and configuration, or the notes say what else differs."""
    found = Comparison(_title(before), _title(after), (len(before), len(after)))
    found.warnings = _warnings(before, after)
    names = sorted(set.intersection(*(set(result.metrics) for result in (*before, *after))))
    if not all_of_them:
        names = [name for name in names if not (name.endswith(HIDDEN) or name.startswith(HIDDEN))]
    for family in ([name for name in names if name in FIRST], [name for name in names if name not in FIRST]):
        sides = [[np.array([result.metrics[name] for result in side]) for side in (before, after)] for name in family]
        found.changes += judge_all(family, sides)
    found.changes.sort(key=lambda one: (one.verdict != "changed", one.metric not in FIRST, -abs(math.log(max(one.ratio, 1e-9)))))
    return found


def judge_all(names: Sequence[str], sides: Sequence[Sequence[npt.NDArray[np.float64]]]) -> list[Change]:
    """The metrics of a family, (before, after) of each, with p corrected for their number."""
    judged = [one for name, (a, b) in zip(names, sides, strict=True) if (one := judge(name, a, b)) is not None]
    found = []
    for one, q in zip(judged, corrected([one.p for one in judged]), strict=True):
        verdict: Verdict = "noise" if one.verdict == "changed" and q > LEVEL else one.verdict
        found.append(replace(one, q=q, verdict=verdict))
    return found


def corrected(p: Sequence[float]) -> list[float]:
    """Benjamini and Hochberg's: the share of false ones among all that are called changes at this level."""
    order = np.argsort(p, kind="stable")
    scaled = np.asarray(p, np.float64)[order] * len(p) / np.arange(1, len(p) + 1)
    q = np.empty(len(p))
    q[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return [float(one) for one in q]


def judge(name: str, a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> Change | None:
    """One metric by itself. None where there is nothing to compare: both medians are 0."""
    x, y = float(np.median(a)), float(np.median(b))
    if x == y == 0:
        return None
    ratio = y / x if x else math.inf
    p = mann_whitney(a, b)
    low, high = _interval(a, b)
    least = 2 / math.comb(a.size + b.size, a.size)
    if least > LEVEL:
        verdict: Verdict = "unknown" if x != y else "noise"
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
        sums = ranks[_dealings(joined.size, a.size)].sum(axis=1)
        return float((np.abs(sums - mean) >= seen).mean())
    chance = np.random.default_rng(0)
    sums = np.array([chance.permutation(ranks)[: a.size].sum() for _ in range(EXACT_LIMIT)])
    return float((1 + (np.abs(sums - mean) >= seen).sum()) / (1 + EXACT_LIMIT))


@cache
def _dealings(values: int, to_one_side: int) -> npt.NDArray[np.int64]:
    """Every way of dealing: the places of one side, i64[ways, to_one_side]."""
    return np.array(list(combinations(range(values), to_one_side)), np.int64)


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


def _warnings(before: Sequence[Result], after: Sequence[Result]) -> list[str]:
    a, b, found = before[0], after[0], []
    if a.scenario != b.scenario:
        found.append(f"the scenarios differ: {a.scenario} and {b.scenario}")
    for name in ("cpu", "cores", "memory_bytes"):
        if a.machine.get(name) != b.machine.get(name):
            found.append(f"the machines differ: {name} {a.machine.get(name)} and {b.machine.get(name)}")
    loads = [float(np.median([result.machine.get("load_average_before", 0.0) for result in side])) for side in (before, after)]
    if abs(loads[0] - loads[1]) >= LOADS_APART[0] and max(loads) >= LOADS_APART[1] * min(loads):
        found.append(f"the machine was busier on one side: load average before a run, median {loads[0]:.3g} and {loads[1]:.3g}")
    for what in ("settings", "load"):
        left, right = _flat(getattr(a, what)), _flat(getattr(b, what))
        for key in sorted(left.keys() | right.keys()):
            if left.get(key) != right.get(key) and key not in OWN:
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
