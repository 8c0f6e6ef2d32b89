"""The report of a run: the same from the run and from its bundle, and its numbers are those of the logs."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser

import pyarrow.parquet as parquet

from live.replay.conftest import Ran
from support.bundles import towline
from towline.bundle.folder import BundleSource
from towline.report.history import read_history


class Outline(HTMLParser):
    """Headings, chart labels, and whatever would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.charts: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag == "svg":
            self.charts.append(found.get("aria-label") or "")
        if tag in ("script", "link", "img", "iframe"):
            self.fetched.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "xlink:href") and not value.startswith("#")]


def test_a_finished_run_has_its_report_and_a_bundle_draws_the_same(ran: Ran, tmp_path):
    own = (ran.folder / "runs" / "small" / "report.html").read_text()
    assert towline(ran.folder, "run", "report", "small", "-o", str(tmp_path / "run.html")).returncode == 0
    done = towline(tmp_path, "run", "report", str(ran.bundle), "-o", "bundle.html")
    assert (done.returncode, done.stdout.strip()) == (0, "bundle.html")
    drawn = (tmp_path / "run.html").read_text()
    assert drawn == (tmp_path / "bundle.html").read_text()
    outline = Outline()
    outline.feed(own)
    assert outline.fetched == []
    assert {"Reward", "Staleness", "Versions in use", "Dropped samples", "Failed attempts"} <= set(outline.charts)
    ids = re.findall(r'\bid="([^"]+)"', own)
    assert len(ids) == len(set(ids)), "charts share the page's names"


async def test_its_numbers_are_those_of_the_summary_and_the_tables(ran: Ran):
    history = await read_history(BundleSource.open(ran.bundle))
    summary = json.loads((ran.folder / "runs" / "small" / "summary.json").read_text())
    staleness = sum((batch.staleness for batch in history.batches), Counter())
    assert sum(staleness.values()) == sum(batch.rows for batch in history.batches) == summary["samples"]["trained"]
    assert max(staleness) == summary["staleness"]["max"]
    assert [batch.depth for batch in history.batches] == list(range(summary["steps"]))
    assert dict(history.drops) == summary["samples"]["dropped"]
    assert (history.evals[0][1], history.evals[-1][1]) == (summary["reward_first"], summary["reward_last"])
    assert len(history.versions) == summary["versions_committed"]
    table = parquet.read_table(ran.bundle / "parquet" / "outcomes.parquet").to_pylist()
    scored = [row for row in table if row["lane"] == "train" and row["kind"] == "score"]
    assert len(history.scores) == len(scored)
    assert sum(score.policy_tokens for score in history.scores) == sum(row["policy_tokens"] for row in scored)
    lags = [score.lag for score in history.scores]
    assert None not in lags
    assert max(lags) <= 2 + 1, "no sample was scored long after the bound had passed it"
    assert len(history.first_use_seconds()) <= len(history.versions)


def test_a_report_goes_only_where_a_folder_is(ran: Ran, tmp_path):
    done = towline(tmp_path, "run", "report", str(ran.bundle), "-o", "none/report.html")
    assert done.returncode == 2
    assert done.stderr == "output: none/report.html: no such folder; make it, or name another file with -o\n"
