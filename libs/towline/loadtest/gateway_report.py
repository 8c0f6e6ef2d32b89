"""The report's part on the gateway: what clients saw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from towline.loadtest.result import Result
from towline.plots import charts
from towline.plots.charts import Series
from towline.plots.page import Page

QUANTILES = ("p50", "p90", "p99", "p99.9")
_LEAST = 1e-5
"""For a logarithmic axis."""


def gateway_section(page: Page, results: Sequence[Result]) -> None:
    """Of the last result; the head of the page has medians over the repetitions."""
    last = results[-1]
    page.heading("What clients saw")
    names = _parts(last)
    page.table(
        ("part", "requests", "answers/s", "tokens/s", "refused", "errors", "p50 ms", "p99 ms", "TTFT p50", "TTFT p99", "ITL p50",
         "TPOT p50", "gateway ms"),
        [_row(last, name) for name in names],
    )  # fmt: skip
    errors = [(name, last.metrics[name]) for name in sorted(last.metrics) if ".errors." in name]
    if errors:
        page.table(("error", "answers"), errors)
    for what, title in (("latency", "Latency"), ("ttft", "TTFT"), ("itl", "ITL"), ("tpot", "TPOT")):
        shown = {
            name: [max(one, _LEAST) for one in last.distributions[f"{name}.{what}_seconds"]]
            for name in ("closed", "bare", "sessions.turn", "grpc", "idle")
            if f"{name}.{what}_seconds" in last.distributions
        }
        page.chart(title, charts.cdf(shown, x_label="seconds", log_x=True), "As sglang's bench_serving and guidellm mean it.")
    if "rates" in last.series:
        _sweep(page, last.series["rates"])
    if "tenants" in last.tables:
        _table(page, "Tenants, all at once", last.tables["tenants"])
    if "rounds" in last.tables:
        _table(page, "Rounds, the gateway and the engine alone in turn", last.tables["rounds"])
    if versions := last.series.get("versions", {}).get("versions"):
        columns = last.series["versions"]
        series = Series("answers", columns["versions"], columns["answers"], "marked")
        page.chart("Versions that answered", charts.lines([series], x_label="version", y_label="answers", y_range=(0, None)),
                   f"{len(versions)} of them.")  # fmt: skip
    looks = last.series.get("looks", {})
    if any(name.startswith("rss.gateway") for name in looks):
        memory = [
            Series(name.removeprefix("rss."), looks["seconds"], [size / 2**20 for size in column])
            for name, column in looks.items()
            if name.startswith("rss.gateway")
        ]
        told = "; ".join(f"{seconds:.0f} s: {what}" for seconds, what in last.events[:24])
        page.chart("Gateway's memory", charts.lines(memory, x_label="seconds", y_label="MiB", y_range=(0, None)), told)


def _parts(result: Result) -> list[str]:
    return [name.removesuffix(".requests") for name in result.metrics if name.endswith(".requests")]


def _row(result: Result, name: str) -> tuple[Any, ...]:
    def of(metric: str, scale: float = 1.0) -> float | str:
        found = result.metrics.get(f"{name}.{metric}")
        return "" if found is None else found * scale

    process = "bare" if name == "bare" else "gateway"
    return (
        name, of("requests"), of("requests_per_second"), of("tokens_per_second"), of("refused"), of("errors"),
        of("latency_seconds.p50", 1e3), of("latency_seconds.p99", 1e3), of("ttft_seconds.p50", 1e3), of("ttft_seconds.p99", 1e3),
        of("itl_seconds.p50", 1e3), of("tpot_seconds.p50", 1e3), of(f"{process}_cpu_seconds_per_request", 1e3),
    )  # fmt: skip


def _sweep(page: Page, rates: dict[str, list[float]]) -> None:
    latency = [Series(name, rates["offered"], [1e3 * one for one in rates[name]], "marked") for name in QUANTILES]
    first = [Series(f"TTFT {q}", rates["offered"], [1e3 * one for one in rates[f"ttft_{q}"]], "marked") for q in ("p50", "p99")]
    page.chart("Latency, offered rates", charts.lines([*latency, *first], x_label="requests/s", y_label="ms", log_y=True),
               "Open loop, from the time at which a request was meant to be sent.")  # fmt: skip
    page.chart("Rate", charts.lines([Series("achieved", rates["offered"], rates["achieved"], "marked")],
               x_label="offered, requests/s", y_label="answers/s", y_range=(0, None)))  # fmt: skip


def _table(page: Page, title: str, rows: list[dict[str, Any]]) -> None:
    page.heading(title)
    page.table(tuple(rows[0]), [tuple(row.values()) for row in rows])
