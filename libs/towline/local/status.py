"""`towline status`: where a run stands, from another shell."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from towline.bus.client import Bus
from towline.bus.topology import ACKS, REPLICAS, STATUS
from towline.config import Settings
from towline.errors import UnavailableError
from towline.local.cleanup import UP
from towline.local.run_directory import Processes, RunDirectory
from towline.replica.fleet import Fleet, decode_fleet
from towline.report.figures import FigureBook, Status, decode_statuses
from towline.report.progress import Progress, progress_line, progress_of
from towline.runtime.console import PlainConsole


@dataclass(frozen=True, slots=True)
class RunStatus:
    """`up`: whether `towline up` runs here; `bus`: its URL, None where the run was never started. Where no bus answers there is
    no progress and there are no services."""

    run: str
    up: bool
    bus: str | None
    progress: Progress | None
    services: list[Status]
    fleet: Fleet
    finished: bool = False
    """Whether it has a summary: it reached its end, and nobody has raised run.steps since."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


async def read_status(directory: RunDirectory, settings: Settings) -> RunStatus:
    """Never starts anything: a stopped run says that it is stopped."""
    up = UP in Processes(directory).alive()
    name = settings.run.name
    if not settings.bus.url:
        return RunStatus(name, up, None, None, [], Fleet())
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
        return RunStatus(name, up, settings.bus.url, None, [], Fleet(), directory.summary_path.is_file())
    try:
        services = decode_statuses(await bus.kv(STATUS).items())
        fleet = decode_fleet(await bus.kv(REPLICAS).items(), await bus.kv(ACKS).items(), now=time.time())
    finally:
        await bus.close()
    book = FigureBook(directory.figures_path)
    book.update(services)
    progress = progress_of(book, steps=settings.run.steps, max_staleness=settings.buffer.max_staleness)
    return RunStatus(name, up, settings.bus.url, progress, services, fleet, directory.summary_path.is_file())


def fleet_lines(fleet: Fleet) -> list[str]:
    """Who serves what, and how versions spread; empty without a replica."""
    if not fleet.members:
        return []
    served = ", ".join(
        f"{count} on version {version}{' (latest)' if version == fleet.latest else ''}"
        for version, count in fleet.serving.items()
    )
    parts = [f"{len(fleet.members)} replicas: {served or 'none serves yet'}"]
    if fleet.slowest is not None:
        parts.append(f"{fleet.slowest} is {fleet.slowest_behind_seconds:.1f} s behind")
    if fleet.publish_to_all_p50_seconds is not None and fleet.publish_to_all_p99_seconds is not None:
        parts.append(
            f"from published to served by all p50 {fleet.publish_to_all_p50_seconds:.2f} s, p99 "
            f"{fleet.publish_to_all_p99_seconds:.2f} s ({fleet.converged} versions)"
        )
    lines = ["fleet: " + "; ".join(parts)]
    for member in fleet.members:
        lines.extend(f"  {member.replica} couldn't serve version {version}: {why}" for version, why in member.failed.items())
    return lines


def print_status(status: RunStatus) -> None:
    console = PlainConsole()
    if not status.services:
        stopped = (
            "is finished; `towline run list` has its outcome" if status.finished else "is stopped; `towline up` goes on with it"
        )
        state = "was never up" if status.bus is None else "is up, its services haven't spoken yet" if status.up else stopped
        console.print(f"run {status.run} {state}", markup=False, soft_wrap=True)
        return
    console.print(f"run {status.run}: {'up' if status.up else 'not up here'}, bus {status.bus}", markup=False, soft_wrap=True)
    if status.progress is not None:
        console.print(progress_line(status.progress), markup=False, soft_wrap=True)
    for line in fleet_lines(status.fleet):
        console.print(line, markup=False, soft_wrap=True)
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
