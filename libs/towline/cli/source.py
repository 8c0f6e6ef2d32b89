"""What the reading commands take: a run's name, its TOML file, or a bundle's folder."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from towline.bundle.source import Source

SourceArgument = Annotated[
    str, typer.Argument(metavar="RUN_OR_BUNDLE", help="A run's name (of one in ./runs), its TOML file, or a bundle's folder.")
]


@contextlib.asynccontextmanager
async def open_source(target: str) -> AsyncIterator[Source]:
    """The run's or the bundle's. Nothing that reads it changes it."""
    folder = Path(target)
    if is_bundle(target):
        from towline.bundle.folder import BundleSource

        yield BundleSource.open(folder)
        return
    from towline.bundle.source import BusSource
    from towline.local.access import open_run
    from towline.local.run_directory import find_run

    directory, settings = find_run(target)
    async with open_run(directory, settings) as access:
        yield await BusSource.open(access.bus, access.objects, access.settings)


def is_bundle(target: str) -> bool:
    """Whether a folder is meant, whole or not, and no run: what is wrong with it is the bundle's to say."""
    from towline.bundle.folder import SETTINGS, STREAMS
    from towline.bundle.manifest import MANIFEST

    folder = Path(target)
    if (folder / MANIFEST).is_file() or (folder / SETTINGS).is_file() or (folder / STREAMS).is_dir():
        return True
    return folder.is_dir() and (folder.is_absolute() or not Path("runs", target).is_dir())
