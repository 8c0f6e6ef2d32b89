"""The study's one figure: how reward grows under each bound, and what is left of it at the end."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from examples.staleness.study import CORRECTIONS, STALENESS

COLOURS = {0: "#1b6ca8", 1: "#2a9d8f", 2: "#8ab17d", 4: "#e9a23b", 8: "#c8442c"}
DASHES = {"none": "-", "tis": "--"}
MARKS = {"none": "o", "tis": "D"}
LABELS = {"none": "no correction", "tis": "truncated importance sampling"}


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the figure; the suffix chooses its format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (curves, ends) = plt.subplots(1, 2, figsize=(12, 4.8), gridspec_kw={"width_ratios": [1.55, 1]}, layout="constrained")
    by_cell: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for result in results.values():
        by_cell[result["max_staleness"], result["correction"]].append(result)
    bounds = [bound for bound in STALENESS if any((bound, name) in by_cell for name in CORRECTIONS)]
    for (bound, correction), found in sorted(by_cell.items()):
        # Held-out, not the trained batches' own: those were sampled by policies that are up to max_staleness steps older.
        depths = [depth for depth, _ in found[0]["held_out"]]
        rewards = np.mean([np.interp(depths, *np.array(result["held_out"]).T) for result in found], axis=0)
        curves.plot(
            depths, rewards, DASHES[correction], color=COLOURS[bound], linewidth=1.6, marker=MARKS[correction], markersize=3.5
        )
    handles = [plt.Line2D([], [], color=COLOURS[bound], label=f"max_staleness {bound}") for bound in bounds]
    handles += [plt.Line2D([], [], color="0.3", linestyle=DASHES[name], label=LABELS[name]) for name in CORRECTIONS]
    curves.legend(handles=handles, fontsize=8, loc="lower right")
    curves.set(xlabel="step", ylabel="held-out reward (256 samples)", title="Learning")

    places = {bound: place for place, bound in enumerate(STALENESS)}
    for shift, correction in ((-0.08, "none"), (0.08, "tis")):
        points = {
            b: [held_out_end(result) for result in found] for (b, name), found in sorted(by_cell.items()) if name == correction
        }
        if not points:
            continue
        for bound, values in points.items():
            ends.plot(
                [places[bound] + shift] * len(values), values, MARKS[correction], color=COLOURS[bound], markersize=6, alpha=0.75
            )
        # No line over a bound that wasn't run.
        middle = [float(np.mean(points[bound])) if bound in points else np.nan for bound in STALENESS]
        at = [places[bound] + shift for bound in STALENESS]
        ends.plot(at, middle, DASHES[correction], color="0.3", linewidth=1.2)
    ends.set_xticks(list(places.values()), [str(bound) for bound in places])
    ends.set(xlabel="buffer.max_staleness", ylabel="held-out reward, mean of the last two evaluations", title="At the end")
    marks = [
        plt.Line2D([], [], color="0.3", marker=MARKS[name], linestyle=DASHES[name], label=LABELS[name]) for name in CORRECTIONS
    ]
    ends.legend(handles=marks, fontsize=8, loc="lower left")
    for axes in (curves, ends):
        axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def held_out_end(result: dict[str, Any]) -> float:
    """The mean of the last two evaluations: one alone has a standard error of about 0.01."""
    return float(np.mean([mean for _, mean in result["held_out"][-2:]]))
