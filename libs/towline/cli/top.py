"""`towline top`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from towline.errors import UsageError


def top(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_TOML", help="A run's name (of one in ./runs) or its TOML file.")],
    once: Annotated[bool, typer.Option("--once", help="One picture, then end; so it is off a terminal too.")] = False,
) -> None:
    """Watch a run: its fleet, versions, queues, dead letters. Ctrl-C ends the watching, not the run."""
    from towline.bus.client import Bus
    from towline.local.access import own_bus_is_down
    from towline.local.run_directory import find_run
    from towline.local.top import LOOK_SECONDS, Screen, watch
    from towline.report.figures import FigureBook
    from towline.runtime.console import PlainConsole

    directory, settings = find_run(target)
    name = settings.run.name
    if not settings.bus.url:
        raise UsageError(
            f"run {settings.run.name} was never up here and names no bus; `towline up` it, or set bus.url", code="run_missing"
        )
    if own_bus_is_down(directory, settings):
        raise UsageError(
            f"run {name} isn't up; `towline up` goes on with it, `towline ui {name}` shows it as it is", code="run_down"
        )

    async def look() -> None:
        bus = await Bus.connect(settings.bus, run=name, client_name=f"top-{name}", patience_seconds=LOOK_SECONDS)
        try:
            screen = Screen(name, settings.run.steps, settings.buffer.max_staleness, FigureBook(directory.figures_path))
            await watch(bus, screen, PlainConsole(), once=once)
        finally:
            await bus.close()

    asyncio.run(look())
