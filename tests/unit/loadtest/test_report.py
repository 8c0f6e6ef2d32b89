"""report.html of each kind of load test has the plots that it's for, their axes named, what they show in them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path

import pytest

from support.written_lives import written
from towline.loadtest.report import render
from towline.loadtest.result import Result, new_result
from towline.loadtest.scenario import load_scenario


def charts_of(html: str) -> dict[str, list[str]]:
    """Title -> every text in the chart: labels, legend, numbers on the axes."""
    found = {}
    for title, svg in re.findall(r"<figure><h3>(.*?)</h3>(<svg.*?</svg>)", html, re.DOTALL):
        tree = ElementTree.fromstring(svg)
        found[unescape(title)] = [node.text or "" for node in tree.iter() if node.tag.endswith("}text")]
    return found


def cells(html: str) -> list[list[str]]:
    """Every row of every table."""
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


def has(charts: dict[str, list[str]], title: str, *texts: str) -> None:
    assert title in charts
    assert set(texts) <= set(charts[title]), charts[title]


def test_a_run_shows_hops_flow_policy_versions_and_processes(tmp_path: Path) -> None:
    html = render([written(tmp_path)])
    charts = charts_of(html)
    has(charts, "Percentiles of each hop", "task to worker", "durable to scored", "ms", "p50", "p99.9")
    has(charts, "Distribution of each hop", "generate", "ms", "share")
    has(charts, "Flow", "admitted", "durable", "scored", "trained", "samples/s", "seconds since the run began")
    has(charts, "Depth", "messages")
    has(charts, "Trainer's idleness", "share")
    has(charts, "TTFT, ITL and TPOT", "TTFT", "ITL", "TPOT", "ms")
    has(charts, "Staleness of trained rows", "rows", "allowed")
    has(charts, "Policy age at training", "seconds")
    has(charts, "A version's way, stacked", "encode", "upload", "verify", "until first serves", "until all serve", "ms", "depth")
    has(charts, "Version propagation", "first worker serves", "all serve", "ms after the entry", "share")
    has(charts, "Resident memory", "buffer", "reward", "MB")
    row = next(row for row in cells(html) if row[0] == "durable to scored")
    assert row[2:] == ["20"] * 4, "20 ms by the hand that wrote the lives"
    assert "mathdefault" not in html, "the numbers of a logarithmic axis are no formulas"


def test_what_was_done_to_a_run_stands_in_its_curves(tmp_path: Path) -> None:
    result = written(tmp_path)
    result.events = [(20.0, "kill reward"), (40.0, "pause trainer"), (48.0, "resume trainer")]
    html = render([result])
    has(charts_of(html), "Flow", "kill", "pause", "resume")
    assert "Kill and recover" in html
    assert "20 s: kill reward; 40 s: pause trainer" in html


def test_a_sweep_shows_throughput_against_workers_and_no_median_over_different_fleets(tmp_path: Path) -> None:
    results = []
    for workers, rate in ((1, 10.0), (2, 20.0), (8, 40.0)):
        result = written(tmp_path, f"workers = {workers}\n")
        result.metrics["samples_per_second"] = rate
        results.append(result)
    html = render(results)
    charts = charts_of(html)
    for title in ("Samples", "Trained tokens within the bound"):
        has(charts, title, "1", "2", "8", "workers", "measured", "in proportion to the first")
    rows = [row[:3] for row in cells(html)]
    assert ["8", "40", "50"] in rows, "half of eight times the first"
    assert ["samples/s", "40"] in cells(html), "the head's figures are those of the most workers"


def transport(tmp_path: Path, text: str) -> Result:
    path = tmp_path / "hop.toml"
    path.write_text(f'[load]\nkind = "transport"\n{text}')
    return new_result(load_scenario(path))


def test_an_open_loop_shows_latency_against_offered_rate_and_its_knee(tmp_path: Path) -> None:
    result = transport(tmp_path, "rates = [100, 200, 400]\n")
    result.series["rates"] = {"offered": [100, 200, 400], "achieved": [100, 200, 250], "p50": [0.001] * 3, "p90": [0.002] * 3,
                              "p99": [0.004, 0.008, 0.3], "p99.9": [0.01, 0.05, 0.9]}  # fmt: skip
    for rate in (100, 200, 400):
        result.distribution(f"rate.{rate}.latency_seconds", [0.001, 0.002])
    result.metrics["knee_per_second"] = 200.0
    charts = charts_of(render([result]))
    has(charts, "Latency against offered rate", "p50", "p99.9", "offered, messages/s", "ms", "knee, 200/s", "100")
    has(charts, "Achieved against offered rate", "achieved", "offered")
    has(charts, "Latency", "100/s", "400/s", "share")


def test_a_closed_loop_shows_each_systems_throughput_and_latency(tmp_path: Path) -> None:
    result = transport(tmp_path, "payload_bytes = [65536]\n")
    for system in ("towline", "nats"):
        result.metrics[f"{system}.65536.messages_per_second"] = 3000.0
        result.distribution(f"{system}.65536.latency_seconds", [0.01, 0.02])
    result.tables["rounds"] = [{"payload": 65536, "system": "nats", "round": 0, "messages_per_second": 3000.0}]
    charts = charts_of(render([result]))
    has(charts, "Throughput", "towline, 64 KiB", "nats, 64 KiB", "messages/s")
    has(charts, "Latency", "towline, 64 KiB", "ms")


@pytest.mark.parametrize("kept", [True, False])
def test_thresholds_stand_with_what_was_found(tmp_path: Path, kept: bool) -> None:
    asked = 50 if kept else 5000
    text = f"[load.thresholds]\n'burst.twice' = {{ most = 0 }}\nknee_per_second = {{ least = {asked} }}\n"
    result = transport(tmp_path, text)
    result.metrics |= {"burst.twice": 0.0, "knee_per_second": 200.0}
    result.judge(load_scenario(tmp_path / "hop.toml"))
    html = render([result])
    assert ["burst.twice", "at most 0", "0", "yes"] in cells(html)
    assert ["knee_per_second", f"at least {asked:,}", "200", "yes" if kept else "no"] in cells(html)
    assert ("Not kept: knee_per_second = 200, at least 5000 is asked" in html) is not kept
