"""Charts as SVG text for a page: text stays text, and ink and paper follow the page's light or dark colours.

Each function gives one <svg> element. Series are drawn in the order given, in colours that stay apart for colour-blind eyes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash

INK, FAINT = "#0f0e0d", "#0d0e0f"
"""Stand-ins for the page's colours: exactly these are replaced in the SVG."""
COLOURS = ("#3b7dd8", "#e08214", "#2a9d6f", "#c2477f", "#7a63c9", "#8c8c3a", "#5ab4ac", "#b35806")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)))
"""Once the colours are used up, series go on in the same colours with other lines."""
WIDTH, HEIGHT = 5.4, 2.7
"""Inches, at 72 pixels each; the page scales them. So wide that the text is still read where a phone shows it."""
LEGEND_CHARACTERS = 60
"""That a line of the legend holds."""
LEGEND_LINE = 0.19
"""Inches, by which a chart is higher for each further line of its legend."""
PLAIN_TICKS = 2.0
"""Decades: a shorter logarithmic axis has numbers at 2 and 5 too."""

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "towline",  # the same data gives the same bytes
    "font.family": "sans-serif",
    "font.size": 10,
    "text.parse_math": False,  # a name with two dollars is a name
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.4,
    "legend.frameon": False,
    "legend.fontsize": 9,
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
    marks: Mapping[str, Sequence[float]] | None = None,
    x_ticks: Sequence[float] | None = None,
) -> str:
    """Lines over a common x. `bound` draws a labelled horizontal limit; `marks`, name -> places on x, vertical lines: what
    happened then. `x_ticks`: the only numbers on the x axis."""
    figure, axes = _figure(x_label, y_label)
    for index, one in enumerate(series):
        look: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "label": one.label}
        dash = DASHES[index // len(COLOURS) % len(DASHES)]
        if one.style == "points":
            axes.plot(one.x, one.y, "o", markersize=4, **look)
        elif one.style == "step":
            axes.step(one.x, one.y, where="post", linewidth=1.4, linestyle=dash, **look)
        else:
            width, alpha = (0.9, 0.7) if one.style == "faint" else (1.6, 1.0)
            marker = "o" if one.style == "marked" else None
            axes.plot(one.x, one.y, marker=marker, markersize=4, linewidth=width, alpha=alpha, linestyle=dash, **look)
    for index, (name, places) in enumerate((marks or {}).items()):
        for place in places:
            label = name if place == places[0] else None
            axes.axvline(place, color=INK, linewidth=0.9, linestyle=DASHES[1 + index % 2], label=label)
    if bound is not None:
        name, value = bound
        axes.axhline(value, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), label=name)
    if log_x:
        _logarithmic(axes.xaxis, axes.set_xscale, [place for one in series for place in one.x])
    if log_y:
        _logarithmic(axes.yaxis, axes.set_yscale, [value for one in series for value in one.y])
    if y_range != (None, None):
        axes.set_ylim(*y_range)
    if x_ticks is not None:
        axes.set_xticks(x_ticks, [f"{place:g}" for place in x_ticks])
        axes.xaxis.set_minor_locator(_ticker().NullLocator())
    return _svg(figure, axes, legend=len(series) > 1 or bound is not None or bool(marks))


def bars(values: Mapping[str, float], *, x_label: str, y_label: str = "") -> str:
    """Horizontal bars, the first on top."""
    figure, axes = _figure(x_label, y_label, height=0.7 + 0.28 * max(len(values), 1))
    names = list(values)
    axes.barh(range(len(names)), [values[name] for name in names], color=COLOURS[0], height=0.65)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    return _svg(figure, axes, legend=False)


def stacked(
    x: Sequence[float],
    parts: Mapping[str, Sequence[float]],
    *,
    x_label: str,
    y_label: str,
    top: float | None = None,
    steps: bool = False,
) -> str:
    """Areas on top of each other; each part is as long as `x`. `steps`: a column at each x, where nothing lies between two."""
    figure, axes = _figure(x_label, y_label)
    if len(x) > 1 and parts:
        colours = [COLOURS[index % len(COLOURS)] for index in range(len(parts))]
        left, right = min(x), max(x)
        if steps:  # whole columns at the ends too
            x, parts = [left - 1, *x, right + 1], {name: [part[0], *part, part[-1]] for name, part in parts.items()}
            left, right = left - 0.5, right + 0.5
        axes.stackplot(x, *parts.values(), labels=list(parts), colors=colours, alpha=0.85, linewidth=0,
                       **({"step": "mid"} if steps else {}))  # fmt: skip
        axes.set_xlim(left, right)
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


def ranges(values: Mapping[str, Mapping[str, float]], *, x_label: str) -> str:
    """A line for each name from its least to its most, with a mark for each part (quantiles); x is logarithmic."""
    figure, axes = _figure(x_label, "", height=1.1 + 0.3 * max(len(values), 1))
    parts = list(dict.fromkeys(part for one in values.values() for part in one))
    for place, one in enumerate(values.values()):
        axes.hlines(place, min(one.values()), max(one.values()), color=FAINT, linewidth=2.5, zorder=1)
    for index, part in enumerate(parts):
        points = [(one[part], place) for place, one in enumerate(values.values()) if part in one]
        axes.plot(*zip(*points, strict=True), "o", markersize=5, color=COLOURS[index % len(COLOURS)], label=part)
    axes.set_yticks(range(len(values)), list(values))
    axes.invert_yaxis()
    _logarithmic(axes.xaxis, axes.set_xscale, [value for one in values.values() for value in one.values()])
    return _svg(figure, axes, legend=True)


def _ticker() -> Any:
    from matplotlib import ticker

    return ticker


def _logarithmic(axis: Any, scale: Callable[[str], object], values: Sequence[float]) -> None:
    """Its numbers as they're said, 0.01 and not a power of ten: without formulas those would be their source text."""
    scale("log")
    ticker = _ticker()
    least, most = min((one for one in values if one > 0), default=1.0), max(values, default=1.0)
    short = most < least * 10**PLAIN_TICKS
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if short else (1,), numticks=9))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


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
            handles, labels = axes.get_legend_handles_labels()
            # Above the curves, never on them; a column takes a line's mark and the longest name.
            columns = min(max(LEGEND_CHARACTERS // (max(map(len, labels)) + 6), 1), len(labels))
            figure.set_figheight(figure.get_figheight() + LEGEND_LINE * (math.ceil(len(labels) / columns) - 1))
            figure.legend(handles, labels, loc="outside upper left", ncols=columns, borderaxespad=0.1,
                          handlelength=1.6, columnspacing=1.4)  # fmt: skip
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = text.replace(INK, "currentColor").replace(FAINT, "var(--faint, #999)")
    # A page has many charts: their ids must not meet, and the page decides the size.
    mark = f"c{xxhash.xxh3_64_hexdigest(text.encode())[:8]}-"
    text = re.sub(r'(id="|href="#|url\(#)', lambda match: match.group(1) + mark, text)
    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r'\1 style="width:100%;height:auto"', text, count=1).strip()
