"""`towline loadtest SCENARIO` and `towline loadtest compare A B`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from towline.cli.paths import file_to_write, to_write
from towline.errors import TowlineError, UsageError

TERMINATED = 128 + 15


def loadtest(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="SCENARIO | compare A B | record RUN",
            help="A scenario's TOML file; two results; a run or a bundle.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            "--out",
            callback=to_write,
            help="Folder of results and report (a new one in runs/); record: a file.",
        ),
    ] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="Instead of load.repetitions.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the runs' streams and objects.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Load the real services with synthetic engines, and say what they hold; a threshold that isn't kept is exit status 1.

    Writes one JSON file a run and report.html. `compare A B` (results, or folders of them) says what changed beyond noise.
    `record RUN --out FILE` writes a run's lengths, turns, speeds and failures for load.lengths_from.
    """
    if what[0] == "compare":
        _compare(what[1:], as_json)
        return
    if what[0] == "record":
        _record(what[1:], output)
        return
    if len(what) != 1:
        raise UsageError("give one scenario: towline loadtest loadtests/throughput.toml", code="scenario")
    from towline.cli.recording import scenario_of
    from towline.cli.runs import _overrides
    from towline.loadtest.campaign import conduct
    from towline.loadtest.report import write_report

    path, changes = Path(what[0]), _overrides(settings or [])
    folder = output or Path("runs") / f"loadtest-{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    scenario = scenario_of(path, changes, folder)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        campaign = asyncio.run(conduct(scenario, folder, say, repetitions=repeat, keep=keep))
    except asyncio.CancelledError:
        say(f"stopped; what was measured is in {folder}")
        raise typer.Exit(TERMINATED) from None
    report = write_report(campaign.results, folder)
    if as_json:
        print(json.dumps({"folder": str(folder), "failed": campaign.failed, "metrics": [r.metrics for r in campaign.results]}))
    else:
        from towline.loadtest.text import summary

        print("\n".join(summary(campaign.results)))
        print(report or folder)
    if campaign.failed:
        raise TowlineError(f"{len(campaign.failed)} not kept: {'; '.join(campaign.failed)}", code="loadtest_failed")


def _record(targets: list[str], output: Path | None) -> None:
    if len(targets) != 1 or output is None:
        raise UsageError("give a run, a bundle or its trajectories, and --out FILE", code="record")
    file_to_write(output)
    from towline.cli.recording import recording_of
    from towline.loadtest.record import write_recording

    found = recording_of(targets[0])
    write_recording(found, output)
    print(f"{found.samples:,} samples, {len(found.groups):,} groups, {sum(found.failures.values()):,} failed attempts: {output}")


def _compare(paths: list[str], as_json: bool) -> None:
    if len(paths) != 2:
        raise UsageError("give two results, or folders of them: towline loadtest compare A B", code="compare")
    from towline.loadtest.compare import compare
    from towline.loadtest.result import read_results

    before, after = (read_results(Path(path)) for path in paths)
    found = compare(before, after)
    print(json.dumps(found.plain()) if as_json else "\n".join(found.lines()))
