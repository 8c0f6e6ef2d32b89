"""Recordings of runs for the load test and the simulator: made by `towline loadtest record`, or on the way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from towline.cli.source import is_bundle, open_source
from towline.errors import UsageError

if TYPE_CHECKING:
    from towline.engine.recording import Recording
    from towline.loadtest.scenario import Scenario


def recording_of(target: str) -> Recording:
    """A run's by its name or TOML file, a bundle's, that of a file of `towline replay --to`."""
    from towline.loadtest.record import record, record_lines

    path = Path(target)
    if path.is_file() and path.suffix != ".toml" and not is_bundle(target):
        with path.open() as lines:
            return record_lines(lines, path.name)

    async def read() -> Recording:
        async with open_source(target) as source:
            return await record(source)

    return asyncio.run(read())


def scenario_of(path: Path, overrides: dict[str, Any], folder: Path) -> Scenario:
    """The scenario; what load.lengths_from names is made a recording in `folder` first, unless it's one."""
    from towline.loadtest.record import write_recording
    from towline.loadtest.scenario import lengths_target, load_scenario

    target = lengths_target(path, overrides)
    if target is not None and not target.made:
        written = folder / "recorded.json"
        try:
            recording = recording_of(target.where)
        except UsageError as error:
            raise UsageError(f"load.lengths_from in {path}: {error.message}", code=error.code) from None
        write_recording(recording, written)
        overrides = overrides | {"load.lengths_from": str(written.absolute())}
    return load_scenario(path, overrides)
