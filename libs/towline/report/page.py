"""A run's report: one HTML file with its curves, readable without a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from towline.plots import charts
from towline.plots.charts import Series
from towline.plots.page import Page
from towline.report.history import BatchPoint, History

LAGS = 4
"""Lags of so many depths and more are one band."""
BINS = 60
"""Of a run's time, in the charts over time."""


def render(history: History, *, max_staleness: int, facts: Sequence[tuple[str, str]] = ()) -> str:
    """The whole page. `facts` stand on top: what the caller knows besides."""
    page = Page(f"Run {history.run}", _lead(history))
    page.facts([*facts, *_facts(history)])
    page.heading("Learning")
    page.chart("Reward", _reward(history), "Per batch as trained, and the held-out evaluations.")
    page.chart("Staleness", _staleness(history, max_staleness), "Depths between a batch and the oldest version in each row.")
    page.chart("Staleness of trained rows", _staleness_histogram(history, max_staleness))
    page.chart("Length", _lengths(history), "Policy tokens of a sample: scored, and trained. A gap is a length bias.")
    page.heading("Policy versions")
    page.chart("Versions in use", _lags(history), "Share of scored samples by how many depths their version was behind the head.")
    page.chart("From commit to first use", _first_use(history), "Until the first sample of a version was scored.")
    page.chart(
        "A version's way", _phases(history), "Upload overlaps encoding and the next step; verification is the publisher's."
    )
    page.chart("Bytes of a version", _bytes(history))
    page.heading("Flow")
    page.chart("Rollout", _rates(history), "Scored samples a second.")
    if history.drops:
        page.chart("Dropped samples", charts.bars(dict(history.drops.most_common()), x_label="samples, by reason"))
    if history.failures:
        page.chart("Failed attempts", charts.bars(dict(history.failures.most_common()), x_label="attempts, by stage"))
    if history.acks:
        page.heading("Replicas' last acknowledgements")
        page.table(
            ("replica", "version", "how", "prepare s", "pause s", "probe's difference", "engine digest"),
            [
                (
                    ack.replica,
                    ack.version,
                    ack.mode,
                    ack.prepare_seconds,
                    ack.pause_seconds,
                    "-" if ack.probe_max_abs_diff is None else ack.probe_max_abs_diff,
                    "-" if ack.engine_digest is None else "equal" if ack.engine_digest == ack.files_digest else "differs",
                )
                for ack in history.acks
            ],
        )
    return page.html()


def write(path: Path, html: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(html, encoding="utf-8")
    temporary.replace(path)


def _lead(history: History) -> str:
    depth = history.versions[-1].depth if history.versions else 0
    end = max([entry.at for entry in history.versions] + [batch.at for batch in history.batches], default=history.began_at)
    return f"{depth} steps, {len(history.versions)} policy versions, {end - history.began_at:.0f} s"


def _facts(history: History) -> list[tuple[str, str]]:
    found = []
    if history.evals:
        (first, start), (last, end) = history.evals[0], history.evals[-1]
        found.append(("reward, held-out", f"{start:.3f} at step {first} -> {end:.3f} at step {last}"))
    rows = sum(batch.rows for batch in history.batches)
    found.append(("trained", f"{rows:,} samples in {len(history.batches)} batches"))
    found.append(("trainer starts after the first", str(history.forks)))
    if not history.drops:
        found.append(("dropped", "none"))
    if history.void_batches:
        found.append(("batches that no version of the line consumed", str(history.void_batches)))
    return found


def _reward(history: History) -> str:
    train = Series("train", [b.depth for b in history.batches], [b.reward_mean for b in history.batches], "faint")
    held_out = Series("held-out", [depth for depth, _ in history.evals], [mean for _, mean in history.evals], "marked")
    return charts.lines([train, held_out], x_label="step", y_label="reward")


def _mean_staleness(batch: BatchPoint) -> float:
    return sum(value * count for value, count in batch.staleness.items()) / max(batch.rows, 1)


def _staleness(history: History, bound: int) -> str:
    full = [batch for batch in history.batches if batch.rows]
    steps = [batch.depth for batch in full]
    return charts.lines(
        [
            Series("mean", steps, [_mean_staleness(batch) for batch in full]),
            Series("max", steps, [max(batch.staleness) for batch in full], "step"),
        ],
        x_label="step",
        y_label="depths",
        y_range=(-0.05, None),
        bound=("allowed", bound),
    )


def _staleness_histogram(history: History, bound: int) -> str:
    total: Counter[int] = Counter()
    for batch in history.batches:
        total.update(batch.staleness)
    return charts.histogram({"rows": total}, x_label="staleness, depths", y_label="rows", bound=("allowed", bound))


def _lengths(history: History) -> str:
    start = history.began_at
    edges, middles = _bins([score.at for score in history.scores] + [batch.at for batch in history.batches], start)
    scored = _binned(edges, [(score.at, score.policy_tokens, 1) for score in history.scores])
    trained = _binned(edges, [(batch.at, batch.policy_tokens, batch.rows) for batch in history.batches])
    series = [
        Series(name, [x for x, y in zip(middles, values, strict=True) if y == y], [y for y in values if y == y])
        for name, values in (("scored", scored), ("trained", trained))
    ]
    return charts.lines(series, x_label="seconds", y_label="policy tokens", y_range=(0, None))


def _lags(history: History) -> str:
    known = [(score.at, min(score.lag, LAGS)) for score in history.scores if score.lag is not None]
    edges, middles = _bins([at for at, _ in known], history.began_at)
    bands = np.zeros((LAGS + 1, len(middles)))
    for at, lag in known:
        bands[lag, _place(edges, at)] += 1
    full = bands.sum(axis=0) > 0
    shares = bands[:, full] / bands[:, full].sum(axis=0)
    names = ["newest", *(f"{lag} behind" for lag in range(1, LAGS)), f"{LAGS} and more behind"]
    parts = {name: share.tolist() for name, share in zip(names, shares, strict=True) if share.any()}
    return charts.stacked(np.asarray(middles)[full].tolist(), parts, x_label="seconds", y_label="share of samples", top=1.0)


def _first_use(history: History) -> str:
    seconds = [max(value, 1e-3) for value in history.first_use_seconds()]
    return charts.cdf({"versions": seconds}, x_label="seconds", log_x=True)


def _phases(history: History) -> str:
    versions = history.versions
    parts = {name: [1000 * getattr(entry, f"{name}_seconds") for entry in versions] for name in ("encode", "upload", "verify")}
    return charts.stacked([entry.depth for entry in versions], parts, x_label="step", y_label="ms")


def _bytes(history: History) -> str:
    steps = [entry.depth for entry in history.versions]
    series = [
        Series("on the wire", steps, [entry.wire_bytes for entry in history.versions]),
        Series("model", steps, [entry.model_bytes for entry in history.versions]),
    ]
    return charts.lines(series, x_label="step", y_label="bytes", log_y=bool(steps))


def _rates(history: History) -> str:
    edges, middles = _bins([score.at for score in history.scores], history.began_at)
    counts = np.zeros(len(middles))
    for score in history.scores:
        counts[_place(edges, score.at)] += 1
    rates = counts / np.diff(edges)
    return charts.lines([Series("samples", middles, rates.tolist())], x_label="seconds", y_label="samples/s", y_range=(0, None))


def _bins(times: Sequence[float], start: float) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], list[float]]:
    """[BINS + 1] edges in Unix seconds, and each bin's middle in seconds since `start`."""
    low, high = (min(times), max(times)) if times else (start, start)
    edges = np.linspace(low, max(high, low + 1.0), BINS + 1)
    return edges, ((edges[:-1] + edges[1:]) / 2 - start).tolist()


def _place(edges: np.ndarray[tuple[int], np.dtype[np.float64]], at: float) -> int:
    return int(np.clip(np.searchsorted(edges, at, side="right") - 1, 0, edges.size - 2))


def _binned(edges: np.ndarray[tuple[int], np.dtype[np.float64]], values: Sequence[tuple[float, float, int]]) -> list[float]:
    """Sums over counts by bin; NaN where a bin has none."""
    sums, counts = np.zeros(edges.size - 1), np.zeros(edges.size - 1)
    for at, value, count in values:
        place = _place(edges, at)
        sums[place] += value
        counts[place] += count
    return [total / count if count else float("nan") for total, count in zip(sums.tolist(), counts.tolist(), strict=True)]
