"""The report's part on a run: hops, engines, policy, weights, processes; and throughput against workers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from towline.contract.policy import ACK_HISTORY
from towline.loadtest.figures import HOPS
from towline.loadtest.result import Result
from towline.loadtest.text import value
from towline.plots import charts
from towline.plots.charts import Series
from towline.plots.page import Page

PHASES = ("encode", "upload", "verify", "until first serves", "until all serve")
QUANTILES = ("p50", "p90", "p99", "p99.9")
HOP_NAMES = {
    "task_to_pulled": "task to worker", "generate": "generate", "finished_to_durable": "finished to durable",
    "durable_to_scored": "durable to scored", "scored_to_batched": "scored to batched", "task_to_batched": "task to batched",
}  # fmt: skip
DEPTHS = {
    "tasks.waiting": "tasks: waiting", "tasks.in_hand": "tasks: in hand",
    "rewards.waiting": "reward: waiting", "rewards.in_hand": "reward: in hand",
}  # fmt: skip
FLEET = {"workers.serving": "workers that serve", "workers.busy": "slots that are busy"}
FLOW = ("admitted", "durable", "scored", "trained", "failed")
EVENTS_TOLD = 12
LEAST_MS = 0.01
"""For a logarithmic axis."""


def workers_section(page: Page, results: Sequence[Result], counts: list[int]) -> None:
    """Throughput against the number of workers: the median of each number's runs, beside the first one's in proportion."""
    of = {count: [result for result in results if int(result.load["workers"]) == count] for count in counts}

    def column(name: str) -> list[float]:
        return [value(of[count], name) or 0.0 for count in counts]

    page.heading("Throughput against workers")
    places = list(map(float, counts))
    shared = {"x_label": "workers", "x_ticks": places, "log_x": True}
    for title, name, label in (
        ("Samples", "samples_per_second", "samples/s"),
        ("Trained tokens within the bound", "goodput_tokens_per_second", "tokens/s"),
    ):
        rates = column(name)
        ideal = [rates[0] * count / counts[0] for count in counts]
        series = [Series("measured", places, rates, "marked"), Series("in proportion to the first", places, ideal, "faint")]
        page.chart(title, charts.lines(series, y_label=label, log_y=all(rates), **shared))  # type: ignore[arg-type]
    rows = [_of_count(of[count], count, counts[0], value(of[counts[0]], "samples_per_second") or 0.0) for count in counts]
    page.table(
        ("workers", "samples/s", "of proportion, %", "trained tokens/s", "slots busy, %", "trainer idle, %",
         "task to worker p99, ms", "durable to scored p99, ms", "version at all p50, ms"),
        rows,
    )  # fmt: skip


def _of_count(results: Sequence[Result], count: int, least: int, rate_of_least: float) -> tuple[object, ...]:
    def of(name: str, scale: float = 1.0) -> float:
        return scale * (value(results, name) or 0.0)

    samples = of("samples_per_second")
    return (
        count, samples, round(100 * samples * least / (count * rate_of_least)) if rate_of_least else "",
        of("goodput_tokens_per_second"),
        round(of("slots_busy_share", 100)), round(of("trainer_idle_share", 100)), of("hop.task_to_pulled.p99", 1e3),
        of("hop.durable_to_scored.p99", 1e3), of("weights.publish_to_all_seconds.p50", 1e3),
    )  # fmt: skip


def run_section(page: Page, results: Sequence[Result]) -> None:
    """Percentiles are medians over the results; curves are the last one's."""
    last = results[-1]
    _hops(page, results)
    _flow(page, last)
    _engines(page, last)
    _policy(page, last)
    _weights(page, last)
    looks = last.series["looks"]
    page.heading("Processes")
    memory = [_present(name.removeprefix("rss."), looks, name, 1e-6) for name in looks if name.startswith("rss.")]
    page.chart("Resident memory", charts.lines(memory, x_label="seconds since the run began", y_label="MB", y_range=(0, None)))


def _hops(page: Page, results: Sequence[Result]) -> None:
    last = results[-1]
    there = [name for name in HOPS if last.metrics.get(f"hop.{name}.count")]
    milliseconds = {
        name: {quantile: 1e3 * (value(results, f"hop.{name}.{quantile}") or 0.0) for quantile in QUANTILES} for name in there
    }
    page.heading("Hops")
    page.table(
        ("hop", "samples", *(f"{quantile}, ms" for quantile in QUANTILES)),
        [(HOP_NAMES[name], int(last.metrics[f"hop.{name}.count"]), *milliseconds[name].values()) for name in there],
    )
    ranges = {HOP_NAMES[name]: {q: max(one, LEAST_MS) for q, one in milliseconds[name].items()} for name in there}
    page.chart("Percentiles of each hop", charts.ranges(ranges, x_label="ms"), "In the order in which a sample takes them.")
    shown = {HOP_NAMES[name]: _floor(last.distributions[f"hop.{name}"]) for name in there}
    page.chart("Distribution of each hop", charts.cdf(shown, x_label="ms", log_x=True), "Of the samples of the measured window.")


def _flow(page: Page, last: Result) -> None:
    looks, flow = last.series["looks"], last.series["flow"]
    actions = sorted({what.partition(" ")[0] for _, what in last.events})
    marks = {action: [at for at, what in last.events if what.startswith(action)] for action in actions}
    clock = "seconds since the run began"
    series = [Series(name, flow["seconds"], flow[name]) for name in FLOW if any(flow.get(name, []))]
    page.heading("Kill and recover" if "kill" in actions else "Pause and recover" if actions else "Over time")
    page.chart("Flow", charts.lines(series, x_label=clock, y_label="samples/s", y_range=(0, None), marks=marks), _events(last))
    waiting = [Series(label, looks["seconds"], looks[name]) for name, label in DEPTHS.items() if any(looks.get(name, []))]
    page.chart("Depth", charts.lines(waiting, x_label=clock, y_label="messages", y_range=(0, None), marks=marks),
               "Of the streams, as the consumers see them.")  # fmt: skip
    fleet = [Series(label, looks["seconds"], looks[name]) for name, label in FLEET.items() if any(looks.get(name, []))]
    page.chart("Fleet", charts.lines(fleet, x_label=clock, y_label="number", y_range=(0, None), marks=marks))
    page.chart("Trainer's idleness", _idle(looks, marks), "Share of the time between two looks in which it waited for a batch.")


def _engines(page: Page, last: Result) -> None:
    timings = {name.upper(): _floor(last.distributions[f"{name}_seconds"]) for name in ("ttft", "itl", "tpot")
               if last.distributions.get(f"{name}_seconds")}  # fmt: skip
    if timings:
        page.heading("Engines")
        page.chart("TTFT, ITL and TPOT", charts.cdf(timings, x_label="ms", log_x=True),
                   "Time to the first token, between tokens, and a token's mean without the first: as sglang's bench_serving and "
                   "guidellm mean them.")  # fmt: skip


def _policy(page: Page, last: Result) -> None:
    page.heading("Policy")
    staleness = last.series["staleness"]
    counts = {int(depth): count for depth, count in zip(staleness["depths"], staleness["rows"], strict=True)}
    page.chart("Staleness of trained rows",
               charts.histogram({"rows": counts}, x_label="depths behind", y_label="rows",
                                bound=("allowed", last.metrics["staleness_bound"])),
               "Between a batch and the oldest version in a row.")  # fmt: skip
    age = last.distributions.get("policy_age_seconds", [])
    page.chart("Policy age at training", charts.cdf({"rows": age}, x_label="seconds"),
               "From the entry of the oldest version in a row to the batch.")  # fmt: skip


def _weights(page: Page, last: Result) -> None:
    page.heading("Weights")
    publish = last.series["publish"]
    parts = {name: [1e3 * seconds for seconds in publish[name]] for name in PHASES}
    page.chart(
        "A version's way, stacked",
        charts.stacked(publish["depth"], parts, x_label="depth", y_label="ms", steps=True),
        "Encode, upload, verify; then from the entry to the first worker, and to the last one, that serves it. A worker "
        f"acknowledges its newest {ACK_HISTORY} versions; of older ones the latter isn't known.",
    )
    spread = {
        label: _floor(last.distributions[f"weights.{name}_seconds"])
        for name, label in (
            ("publish_to_first_serving", "first worker serves"), ("publish_to_first_token", "first token"),
            ("publish_to_serving", "a worker serves"), ("publish_to_all", "all serve"),
        )
        if last.distributions.get(f"weights.{name}_seconds")
    }  # fmt: skip
    page.chart("Version propagation", charts.cdf(spread, x_label="ms after the entry", log_x=True),
               "Share of versions (or of versions and workers) that got so far within x.")  # fmt: skip


def _present(label: str, looks: dict[str, list[float]], name: str, scale: float) -> Series:
    """A process's line while it lives: a look that didn't find it has 0."""
    points = [(at, one * scale if one else math.nan) for at, one in zip(looks["seconds"], looks[name], strict=True)]
    return Series(label, [at for at, _ in points], [one for _, one in points])


def _idle(looks: dict[str, list[float]], marks: dict[str, list[float]]) -> str:
    idle, seconds = looks.get("trainer.idle_seconds", []), looks["seconds"]
    steps = [
        (seconds[place], min(max((idle[place] - idle[place - 1]) / (seconds[place] - seconds[place - 1]), 0.0), 1.0))
        for place in range(1, len(idle))
    ]
    series = Series("idle", [x for x, _ in steps], [y for _, y in steps])
    return charts.lines([series], x_label="seconds since the run began", y_label="share", y_range=(0, 1.02), marks=marks)


def _events(result: Result) -> str:
    told = "; ".join(f"{seconds:.0f} s: {what}" for seconds, what in result.events[:EVENTS_TOLD])
    told += f"; and {len(result.events) - EVENTS_TOLD} more" if len(result.events) > EVENTS_TOLD else ""
    if result.settings["buffer"]["keep_history"]:
        return told
    return f"The streams were purged: this is what they still held at the end. {told}".rstrip()


def _floor(seconds: Sequence[float]) -> list[float]:
    """Milliseconds for a logarithmic axis."""
    return [max(1e3 * one, LEAST_MS) for one in seconds]
