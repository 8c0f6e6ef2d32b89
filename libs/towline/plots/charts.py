"""Charts as SVG text for a page: text stays text, and ink and paper follow the page's light or dark colours.

Each function gives one <svg> element. Series are drawn in the order given, in colours that stay apart for colour-blind eyes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash

INK, FAINT = "#0f0e0d", "#0d0e0f"
"""Stand-ins for the page's colours: exactly these are replaced in the SVG."""
COLOURS = ("#3b7dd8", "#e08214", "#2a9d6f", "#c2477f", "#7a63c9", "#8c8c3a", "#5ab4ac", "#b35806")
WIDTH, HEIGHT = 7.2, 2.9
"""Inches, at 72 pixels each; the page scales them."""

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "towline",  # the same data gives the same bytes
    "font.family": "sans-serif",
    "font.size": 9,
    "text.parse_math": False,  # a name with two dollars is a name
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.4,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True, slots=True)
class Series:
    """`x` and `y` of one length; `style`: a line, one with its points marked, a thin one, steps that hold a value until the
    next, or points alone."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: Literal["line", "marked", "faint", "step", "points"] = "line"


def lines(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    y_range: tuple[float | None, float | None] = (None, None),
    log_x: bool = False,
    log_y: bool = False,
    bound: tuple[str, float] | None = None,
) -> str:
    """Lines over a common x. `bound` draws a labelled horizontal limit."""
    figure, axes = _figure(x_label, y_label)
    for index, one in enumerate(series):
        colour = COLOURS[index % len(COLOURS)]
        if one.style == "points":
            axes.plot(one.x, one.y, "o", color=colour, markersize=4, label=one.label)
        elif one.style == "step":
            axes.step(one.x, one.y, where="post", color=colour, linewidth=1.4, label=one.label)
        else:
            width, alpha = (0.9, 0.7) if one.style == "faint" else (1.6, 1.0)
            marker = "o" if one.style == "marked" else None
            axes.plot(one.x, one.y, marker=marker, markersize=4, color=colour, linewidth=width, alpha=alpha, label=one.label)
    if bound is not None:
        name, value = bound
        axes.axhline(value, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), label=name)
    axes.set_ylim(*y_range)
    if log_x:
        axes.set_xscale("log")
    if log_y:
        axes.set_yscale("log")
    return _svg(figure, axes, legend=len(series) > 1 or bound is not None)


def bars(values: Mapping[str, float], *, x_label: str, y_label: str = "") -> str:
    """Horizontal bars, the first on top."""
    figure, axes = _figure(x_label, y_label, height=0.7 + 0.28 * max(len(values), 1))
    names = list(values)
    axes.barh(range(len(names)), [values[name] for name in names], color=COLOURS[0], height=0.65)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    return _svg(figure, axes, legend=False)


def stacked(
    x: Sequence[float], parts: Mapping[str, Sequence[float]], *, x_label: str, y_label: str, top: float | None = None
) -> str:
    """Areas on top of each other; each part is as long as `x`."""
    figure, axes = _figure(x_label, y_label)
    if len(x) > 1 and parts:
        colours = [COLOURS[index % len(COLOURS)] for index in range(len(parts))]
        axes.stackplot(x, *parts.values(), labels=list(parts), colors=colours, alpha=0.85, linewidth=0)
        axes.set_xlim(min(x), max(x))
    axes.set_ylim(0, top)
    return _svg(figure, axes, legend=True)


def histogram(
    counts: Mapping[str, Mapping[int, float]], *, x_label: str, y_label: str, bound: tuple[str, float] | None = None
) -> str:
    """Bars at whole numbers, one colour a name, side by side."""
    figure, axes = _figure(x_label, y_label)
    width = 0.8 / max(len(counts), 1)
    for index, (name, values) in enumerate(counts.items()):
        places = [value + (index - (len(counts) - 1) / 2) * width for value in values]
        axes.bar(places, list(values.values()), width=width, color=COLOURS[index % len(COLOURS)], label=name)
    if bound is not None:
        name, value = bound
        axes.axvline(value + 0.5, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return _svg(figure, axes, legend=len(counts) > 1 or bound is not None)


def cdf(values: Mapping[str, Sequence[float]], *, x_label: str, log_x: bool = False) -> str:
    """The share of each name's values that are at most x."""
    series = []
    for name, given in values.items():
        ordered = np.sort(np.asarray(given, np.float64))
        if ordered.size:
            shares = np.arange(1, ordered.size + 1) / ordered.size
            series.append(Series(name, ordered.tolist(), shares.tolist(), "step"))
    return lines(series, x_label=x_label, y_label="share", y_range=(0, 1.02), log_x=log_x)


def _figure(x_label: str, y_label: str, height: float = HEIGHT) -> tuple[Any, Any]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    with rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(True, axis="both")
        axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Any, axes: Any, *, legend: bool) -> str:
    from matplotlib import rc_context

    with rc_context(_STYLE):
        if legend and axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = text.replace(INK, "currentColor").replace(FAINT, "var(--faint, #999)")
    # A page has many charts: their ids must not meet, and the page decides the size.
    mark = f"c{xxhash.xxh3_64_hexdigest(text.encode())[:8]}-"
    text = re.sub(r'(id="|href="#|url\(#)', lambda match: match.group(1) + mark, text)
    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r'\1 style="width:100%;height:auto"', text, count=1).strip()
