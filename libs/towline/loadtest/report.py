"""report.html of a load test: the same page and charts as a run's report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from towline.loadtest.figures import HOPS
from towline.loadtest.gateway_report import gateway_section
from towline.loadtest.result import Result
from towline.loadtest.text import rows, value
from towline.plots import charts
from towline.plots.charts import Series
from towline.plots.page import Page
from towline.report.page import write

PHASES = ("encode", "upload", "verify", "until first serves", "until all serve")
QUANTILES = ("p50", "p90", "p99", "p99.9")


def write_report(results: Sequence[Result], folder: Path) -> Path | None:
    """The page's path; None where matplotlib isn't installed."""
    try:
        html = render(results)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        return None
    path = folder / "report.html"
    write(path, html)
    return path


def render(results: Sequence[Result]) -> str:
    """Figures are medians over the repetitions; curves over time are the last one's."""
    first, last = results[0], results[-1]
    page = Page(
        f"Load test {first.scenario}",
        f"{len(results)} run{'s' if len(results) > 1 else ''}, {last.measured_seconds:.0f} s measured",
    )
    page.facts(_facts(results))
    for line in [line for result in results for line in result.failed]:
        page.text(f"Not kept: {line}", bad=True)
    page.heading("In short")
    page.table(("figure", "median"), rows(results))
    if first.kind == "gateway":
        gateway_section(page, results)
    elif first.kind == "run":
        _run(page, results)
    else:
        _hop(page, results)
    page.heading("Settings")
    page.facts([(key, str(item)) for key, item in first.load.items() if item not in ([], {}, "")])
    return page.html()


def _facts(results: Sequence[Result]) -> list[tuple[str, str]]:
    first = results[0]
    return [
        ("command", first.command),
        ("commit", first.commit),
        ("date", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(first.started_at))),
        ("machine", ", ".join(f"{key} {item}" for key, item in first.machine.items())),
        ("seed", str(first.seed)),
        ("warm-up", f"{first.warm_up_seconds:g} s after the first batch, left out"),
    ]


def _run(page: Page, results: Sequence[Result]) -> None:
    last = results[-1]
    looks, flow = last.series["looks"], last.series["flow"]
    page.heading("Hops")
    names = [f"hop.{name}" for name in HOPS]
    page.table(
        ("hop", "samples", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms"),
        [
            (name.removeprefix("hop."), int(last.metrics.get(f"{name}.count", 0)),
             *[1e3 * (value(results, f"{name}.{quantile}") or 0.0) for quantile in QUANTILES])
            for name in names
        ],
    )  # fmt: skip
    shown = {name.removeprefix("hop."): _floor(last.distributions[name]) for name in names if name in last.distributions}
    page.chart("Hops", charts.cdf(shown, x_label="seconds", log_x=True), "Of the samples of the measured window.")
    page.chart("Flow", _over_time(flow, ("admitted", "durable", "scored", "trained", "failed"), "samples/s"), _events(last))
    page.chart("Depth", _over_time(looks, ("tasks.waiting", "tasks.in_hand", "rewards.waiting", "rewards.in_hand"), "messages"))
    page.chart("Fleet", _over_time(looks, ("workers.serving", "workers.busy"), "workers, slots"), _events(last))
    page.heading("Engines")
    timings = {
        name: _floor(last.distributions[f"{name}_seconds"])
        for name in ("ttft", "itl", "tpot")
        if f"{name}_seconds" in last.distributions
    }
    page.chart(
        "TTFT, ITL, TPOT", charts.cdf(timings, x_label="seconds", log_x=True), "As sglang's bench_serving and guidellm mean them."
    )
    page.heading("Policy")
    staleness = last.series["staleness"]
    counts = {int(depth): count for depth, count in zip(staleness["depths"], staleness["rows"], strict=True)}
    bound = last.metrics["staleness_bound"]
    page.chart(
        "Staleness of trained rows",
        charts.histogram({"rows": counts}, x_label="depths", y_label="rows", bound=("allowed", bound)),
    )
    page.chart(
        "Policy age at training", charts.cdf({"rows": last.distributions.get("policy_age_seconds", [])}, x_label="seconds")
    )
    page.chart("Trainer", _trainer(last), "Share of the time between two looks that it waited.")
    page.heading("Weights")
    publish = last.series["publish"]
    parts = {name: [1e3 * seconds for seconds in publish[name]] for name in PHASES}
    page.chart("A version's way", charts.stacked(publish["depth"], parts, x_label="depth", y_label="ms"))
    spread = {
        label: _floor(last.distributions[f"weights.{name}_seconds"])
        for name, label in (
            ("publish_to_serving", "a worker"),
            ("publish_to_all", "all"),
            ("publish_to_first_token", "first token"),
        )
        if f"weights.{name}_seconds" in last.distributions
    }
    page.chart("Propagation", charts.cdf(spread, x_label="seconds after the entry", log_x=True))
    page.heading("Machine")
    memory = [name for name in looks if name.startswith("rss.")]
    series = [Series(name.removeprefix("rss."), looks["seconds"], [size / 1e6 for size in looks[name]]) for name in memory]
    page.chart("Resident memory", charts.lines(series, x_label="seconds", y_label="MB", y_range=(0, None)))
    workers = sorted({(int(result.load["workers"]), result.metrics["samples_per_second"]) for result in results})
    if len({count for count, _ in workers}) > 1:
        at = [float(count) for count, _ in workers]
        page.chart("Throughput", charts.lines([Series("samples", at, [rate for _, rate in workers], "marked")],
                   x_label="workers", y_label="samples/s", y_range=(0, None)))  # fmt: skip


def _hop(page: Page, results: Sequence[Result]) -> None:
    last = results[-1]
    page.heading("Worker to trainer")
    if "rates" in last.series:
        rates = last.series["rates"]
        series = [Series(name, rates["offered"], [1e3 * one for one in rates[name]], "marked") for name in QUANTILES]
        page.chart("Latency", charts.lines(series, x_label="offered, messages/s", y_label="ms", log_y=True),
                   "From the time at which a message was meant to be sent.")  # fmt: skip
        page.chart("Rate", charts.lines([Series("achieved", rates["offered"], rates["achieved"], "marked")],
                   x_label="offered, messages/s", y_label="messages/s", y_range=(0, None)))  # fmt: skip
    named = {
        name.removesuffix(".latency_seconds"): _floor(one)
        for name, one in last.distributions.items()
        if name.endswith(".latency_seconds")
    }
    page.chart("Latencies", charts.cdf(named, x_label="seconds", log_x=True))
    if "rounds" in last.tables:
        rounds = [(one["payload"], one["system"], one["round"], one["messages_per_second"]) for one in last.tables["rounds"]]
        page.table(("payload bytes", "system", "round", "messages/s"), rounds)


def _over_time(columns: dict[str, list[float]], names: Sequence[str], label: str) -> str:
    series = [Series(name, columns["seconds"], columns[name]) for name in names if any(columns.get(name, []))]
    return charts.lines(series, x_label="seconds", y_label=label, y_range=(0, None))


def _trainer(result: Result) -> str:
    looks = result.series["looks"]
    idle, seconds = looks.get("trainer.idle_seconds", []), looks["seconds"]
    steps = [
        (seconds[place], min(max((idle[place] - idle[place - 1]) / (seconds[place] - seconds[place - 1]), 0.0), 1.0))
        for place in range(1, len(idle))
    ]
    return charts.lines(
        [Series("idle", [x for x, _ in steps], [y for _, y in steps])], x_label="seconds", y_label="share", y_range=(0, 1.02)
    )


def _events(result: Result) -> str:
    told = "; ".join(f"{seconds:.0f} s: {what}" for seconds, what in result.events[:12])
    return told + (f"; and {len(result.events) - 12} more" if len(result.events) > 12 else "")


def _floor(values: Sequence[float]) -> list[float]:
    """For a logarithmic axis."""
    return [max(one, 1e-5) for one in values]
