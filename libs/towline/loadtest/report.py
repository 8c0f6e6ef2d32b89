"""report.html of a load test: the same page and charts as a run's report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from towline.loadtest.gateway_report import gateway_section
from towline.loadtest.hop_report import hop_section
from towline.loadtest.result import Result
from towline.loadtest.run_report import run_section, workers_section
from towline.loadtest.text import largest, numbers_of_workers, rows
from towline.plots.page import Page
from towline.report.page import write

EMPTY: tuple[Any, ...] = ([], {}, "", None)


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
    """Figures are medians over the repetitions, curves the last one's. Of a sweep over workers both are those of the most."""
    first, counts = results[0], numbers_of_workers(results)
    shown = largest(results)
    page = Page(f"Load test {first.scenario}", _lead(results, counts))
    page.facts(_facts(results))
    _verdict(page, results)
    if len(counts) > 1:
        workers_section(page, results, counts)
    page.heading(f"In short, with {counts[-1]} workers" if len(counts) > 1 else "In short")
    page.table(("figure", "median" if len(shown) > 1 else "value"), rows(shown))
    if first.kind == "gateway":
        gateway_section(page, shown)
    elif first.kind == "run":
        run_section(page, shown)
    else:
        hop_section(page, shown)
    page.heading("Settings")
    shown_elsewhere = {"thresholds"} | ({"gateway"} if first.kind != "gateway" else set())
    page.facts([(key, _said(item)) for key, item in first.load.items() if item not in EMPTY and key not in shown_elsewhere])
    return page.html()


def _lead(results: Sequence[Result], counts: list[int]) -> str:
    if len(counts) > 1:
        return f"{len(results)} runs, with {counts[0]} to {counts[-1]} workers"
    rates = " at each rate" if "rates" in results[-1].series else ""
    seconds = f", {results[-1].measured_seconds:.0f} s measured{rates}" if results[-1].measured_seconds else ""
    if len(results) == 1:
        return f"1 run{seconds}"
    return f"{len(results)} repetitions{seconds} each; figures are their medians, curves the last one's"


def _facts(results: Sequence[Result]) -> list[tuple[str, str]]:
    first = results[0]
    machine = first.machine
    loads = [float(result.machine.get("load_average_before", 0.0)) for result in results]
    found = [
        ("command", first.command),
        ("commit", first.commit),
        ("date", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(first.started_at))),
        ("machine", f"{machine.get('cores')} cores of {machine.get('cpu')}, {machine.get('memory_bytes', 0) / 1e9:.0f} GB, "
                    f"{machine.get('system')}, Python {machine.get('python')}"),
        ("load average before", f"{loads[0]:g}" if len(loads) == 1 else f"{min(loads):g} to {max(loads):g}"),
        ("seed", str(first.seed)),
    ]  # fmt: skip
    if first.kind == "run":
        found.append(("warm-up", f"{first.warm_up_seconds:g} s after the first batch, left out"))
    return found


def _verdict(page: Page, results: Sequence[Result]) -> None:
    """What it had to keep to, and whether it did, in each run."""
    told = [line for result in results for line in result.failed]
    for line in dict.fromkeys(told):
        page.text(f"Not kept: {line}" + (f" (in {told.count(line)} runs)" if told.count(line) > 1 else ""), bad=True)
    asked: dict[str, dict[str, float]] = results[0].load.get("thresholds") or {}
    if not asked:
        return
    page.heading("Thresholds")
    page.table(("metric", "asked", "found", "kept"), [_threshold(results, name, one) for name, one in sorted(asked.items())])


def _threshold(results: Sequence[Result], name: str, one: dict[str, float]) -> tuple[str, str, str, str]:
    least, most = one.get("least"), one.get("most")
    bounds = [f"at least {least:,g}" if least is not None else "", f"at most {most:,g}" if most is not None else ""]
    asked = " and ".join(filter(None, bounds))
    values = [result.metrics[name] for result in results if name in result.metrics]
    missed = sum(any(line.startswith((f"{name} =", f"{name}:")) for line in result.failed) for result in results)
    kept = "yes" if not missed else "no" if missed == len(results) else f"no, in {missed} of {len(results)} runs"
    if not values:
        return name, asked, "not measured", kept
    low, high = min(values), max(values)
    return name, asked, f"{low:,.6g}" if low == high else f"{low:,.6g} to {high:,.6g}", kept


def _said(item: Any) -> str:
    """A setting's value as the scenario has it."""
    if isinstance(item, dict):
        return ", ".join(f"{key} {_said(value)}" for key, value in item.items() if value not in EMPTY)
    if isinstance(item, list | tuple):
        return "; ".join(_said(one) for one in item) if item and isinstance(item[0], dict) else " ".join(map(_said, item))
    return str(item)
