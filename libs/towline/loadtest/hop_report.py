"""The report's part on one hop, worker to trainer: what it held, and how long a message took."""

from __future__ import annotations

from collections.abc import Sequence

from towline.loadtest.result import Result
from towline.plots import charts
from towline.plots.charts import Series
from towline.plots.page import Page

QUANTILES = ("p50", "p90", "p99", "p99.9")
LEAST_MS = 0.01
"""For a logarithmic axis."""


def hop_section(page: Page, results: Sequence[Result]) -> None:
    """Of the last result."""
    last = results[-1]
    page.heading("Worker to trainer")
    if "rates" in last.series:
        _sweep(page, last)
    systems = {name.removesuffix(".messages_per_second"): rate for name, rate in last.metrics.items()
               if name.endswith(".messages_per_second")}  # fmt: skip
    if systems:
        page.chart("Throughput", charts.bars({_named(name): rate for name, rate in systems.items()}, x_label="messages/s"),
                   "Closed loop; median over rounds in turn.")  # fmt: skip
    latencies = {
        _named(name.removesuffix(".latency_seconds")): [max(1e3 * value, LEAST_MS) for value in values]
        for name, values in last.distributions.items()
        if name.endswith(".latency_seconds")
    }
    page.chart("Latency", charts.cdf(latencies, x_label="ms", log_x=True), "Share of the messages that arrived within x.")
    if "rounds" in last.tables:
        rounds = [(one["payload"], one["system"], one["round"], one["messages_per_second"]) for one in last.tables["rounds"]]
        page.table(("payload, bytes", "system", "round", "messages/s"), rounds)


def _sweep(page: Page, last: Result) -> None:
    rates = last.series["rates"]
    knee = last.metrics.get("knee_per_second", 0.0)
    marks = {f"knee, {knee:,g}/s": [knee]} if knee else None
    offered = rates["offered"]
    page.chart(
        "Latency against offered rate",
        charts.lines([Series(name, offered, [max(1e3 * one, LEAST_MS) for one in rates[name]], "marked") for name in QUANTILES],
                     x_label="offered, messages/s", y_label="ms", log_y=True, marks=marks),
        "Open loop: from the time at which a message was meant to be sent, so a stall counts for all that were due in it.",
    )  # fmt: skip
    page.chart(
        "Achieved against offered rate",
        charts.lines([Series("achieved", offered, rates["achieved"], "marked"), Series("offered", offered, offered, "faint")],
                     x_label="offered, messages/s", y_label="messages/s", y_range=(0, None), marks=marks),
        "The knee is the last rate up to which all were kept up with.",
    )  # fmt: skip


def _named(name: str) -> str:
    """`towline.65536` -> towline, 64 KiB; `rate.500` -> 500/s."""
    first, dot, rest = name.partition(".")
    if first == "rate":
        return f"{float(rest):,g}/s"
    if not (dot and rest.isdigit()):
        return name
    size = int(rest)
    return f"{first}, " + (f"{size >> 10} KiB" if size % 1024 == 0 else f"{size / 1e6:g} MB" if size >= 10**6 else f"{size} B")
