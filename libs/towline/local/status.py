"""`towline status`: where a run stands, from another shell."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from towline.bus.client import Bus
from towline.bus.topology import STATUS
from towline.config import Settings
from towline.errors import UnavailableError
from towline.local.cleanup import UP
from towline.local.figures import FigureBook, Status, decode_statuses
from towline.local.progress import Progress, progress_line, progress_of
from towline.local.run_directory import Processes, RunDirectory


@dataclass(frozen=True, slots=True)
class RunStatus:
    """`up`: whether `towline up` runs here; `bus`: its URL, None where the run was never started. Where no bus answers there is
    no progress and there are no services."""

    run: str
    up: bool
    bus: str | None
    progress: Progress | None
    services: list[Status]

    def plain(self) -> dict[str, Any]:
        return asdict(self)


async def read_status(directory: RunDirectory, settings: Settings) -> RunStatus:
    """Never starts anything: a stopped run says that it is stopped."""
    up = UP in Processes(directory).alive()
    name = settings.run.name
    if not settings.bus.url:
        return RunStatus(name, up, None, None, [])
    try:
        bus = await Bus.connect(
            settings.bus.model_copy(update={"connect_timeout_seconds": min(settings.bus.connect_timeout_seconds, 3.0)}),
            run=name,
            client_name=f"status-{name}",
            patience_seconds=3.0,
        )
    except UnavailableError:
        if up or directory.nats().pid is not None:
            raise
        return RunStatus(name, up, settings.bus.url, None, [])
    try:
        services = decode_statuses(await bus.kv(STATUS).items())
    finally:
        await bus.close()
    book = FigureBook(directory.figures_path)
    book.update(services)
    progress = progress_of(book, steps=settings.run.steps, max_staleness=settings.buffer.max_staleness)
    return RunStatus(name, up, settings.bus.url, progress, services)


def print_status(status: RunStatus) -> None:
    console = Console(highlight=False)
    if not status.services:
        state = "was never up" if status.bus is None else "is up, its services haven't spoken yet" if status.up else "is stopped"
        console.print(f"run {status.run} {state}", markup=False, soft_wrap=True)
        return
    console.print(f"run {status.run}: {'up' if status.up else 'not up here'}, bus {status.bus}", markup=False, soft_wrap=True)
    if status.progress is not None:
        console.print(progress_line(status.progress), markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for column in ("service", "replica", "ready", "pid", "port", "seen", "reason"):
        table.add_column(column)
    now = time.time()
    for entry in status.services:
        seen = f"{max(now - entry.at, 0):.0f} s ago"
        table.add_row(
            entry.service, entry.replica, "yes" if entry.ready else "no", str(entry.pid), str(entry.port), seen, entry.reason
        )
    console.print(table)
