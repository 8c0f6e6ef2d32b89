"""`towline doctor`: what a run needs, looked at from here, with what to do about it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from towline.runtime.terminal import say

if TYPE_CHECKING:
    from towline.config import Settings
    from towline.doctor.finding import Finding
    from towline.local.run_directory import RunDirectory

HERE = Path("runs")
NONE_NAMED = "none is named: `towline up` starts its own; services apart need one"
DOWN = "the run's own, which is down: `towline up` starts it"
MARKS = {"ok": "ok      ", "warning": "warning ", "fault": "FAULT   "}


def doctor(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[RUN_OR_TOML]", help="A run's name or its TOML file; without one, this machine alone."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check machine, settings, bus, store, clocks, versions, model and engine. Exit status 1 where a run can't work."""
    found: list[Finding] = []

    async def look() -> None:
        async for finding in _findings(target):
            found.append(finding)
            if not as_json:
                say(f"{MARKS[finding.state]}{finding.part + ':':10}{finding.what}")
                if finding.remedy:
                    say(f"{'':18}-> {finding.remedy}")

    asyncio.run(look())
    faults = sum(finding.state == "fault" for finding in found)
    if as_json:
        print(json.dumps({"faults": faults, "findings": [finding.plain() for finding in found]}))
    if faults:
        raise typer.Exit(1)


async def _findings(target: str | None) -> AsyncIterator[Finding]:
    from towline.doctor.bus import look_at_bus
    from towline.doctor.finding import ok
    from towline.doctor.halves import look_at_halves
    from towline.doctor.machine import look_at_machine
    from towline.doctor.settings import look_at_settings
    from towline.doctor.store import look_at_store
    from towline.local.run_directory import find_run

    if target is None:
        for finding in look_at_machine(HERE, servers=True):
            yield finding
        return
    directory, settings = find_run(target)
    own = _own_servers(directory, settings)
    for finding in look_at_machine(directory.path, servers=bool(own)):
        yield finding
    for finding in await asyncio.to_thread(lambda: list(look_at_settings(settings, directory.path))):
        yield finding
    for name, what in own.items():
        yield ok(name, what)
    if "bus" not in own:
        async for finding in look_at_bus(settings.bus, settings.run.name):
            yield finding
    if "store" not in own:
        for finding in await asyncio.to_thread(lambda: list(look_at_store(settings.store, settings.run.name))):
            yield finding
    if not {"bus", "store"} & set(own):
        async for finding in look_at_halves(settings):
            yield finding


def _own_servers(directory: RunDirectory, settings: Settings) -> dict[str, str]:
    """Those that there is nothing to look at: `towline up` starts them, and hasn't yet or they're down."""
    from towline.errors import MissingError

    found = {}
    if not settings.bus.url:
        found["bus"] = NONE_NAMED
    if not settings.store.url:
        found["store"] = NONE_NAMED
    with contextlib.suppress(MissingError):  # none was ever started here
        nats = directory.nats()
        if nats.url == settings.bus.url and nats.pid is None:
            found["bus"] = DOWN
    with contextlib.suppress(MissingError):
        s3 = directory.s3()
        if s3.endpoint == settings.store.endpoint and s3.pid is None:
            found["store"] = DOWN
    return found
