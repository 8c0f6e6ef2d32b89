"""`towline run report`: a run's, or a bundle's, curves in one HTML file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from towline.cli.paths import file_to_write
from towline.cli.source import SourceArgument, open_source


def report(
    target: SourceArgument,
    output: Annotated[Path, typer.Option("-o", "--output", callback=file_to_write, help="The file to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Draw the run so far: reward, staleness, versions and their bytes, where samples went. The file needs no network."""
    from towline.errors import UsageError

    if not output.absolute().parent.is_dir():
        raise UsageError(f"{output}: no such folder; make it, or name another file with -o", code="output")

    async def draw() -> str:
        from towline.report.history import read_history
        from towline.report.page import render

        async with open_source(target) as source:
            return render(await read_history(source), max_staleness=source.settings.buffer.max_staleness)

    from towline.report.page import write

    write(output, asyncio.run(draw()))
    print(output)
