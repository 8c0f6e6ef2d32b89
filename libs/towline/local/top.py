"""`towline top`: a run's fleet, versions, queues and dead letters, live, from any shell that reaches its bus. It only reads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from towline.bundle.source import decode_acks
from towline.bus.client import Bus, StreamState
from towline.bus.topology import ACKS, CONTROL, DEAD, OUTCOME, REPLICAS, STATUS, TRAJECTORY
from towline.contract.policy import Ack, ReplicaInfo, decode_replica
from towline.errors import MalformedError, TowlineError, UnavailableError
from towline.local.live import curve
from towline.replica.fleet import fleet_of
from towline.report.figures import FigureBook, Status, decode_statuses
from towline.report.progress import progress_of, size

EVERY_SECONDS = 1.0
LOOK_SECONDS = 5.0
MOST_REPLICAS = 20
"""Rows of the fleet's table; the rest is counted."""
MOST_VERSIONS = 4
_QUEUES = (CONTROL, TRAJECTORY, OUTCOME, DEAD)


@dataclass(slots=True)
class Look:
    """What the bus said at `at` (Unix seconds)."""

    at: float
    statuses: list[Status]
    replicas: list[ReplicaInfo]
    acks: dict[str, Ack]
    streams: dict[str, StreamState]


@dataclass(slots=True)
class Screen:
    """Draws looks; remembers what a single one can't say: rates and curves."""

    run: str
    steps: int
    max_staleness: int
    book: FigureBook
    _train: dict[int, float] = field(default_factory=dict)

    def draw(self, look: Look) -> RenderableType:
        self.book.update(look.statuses)
        return Group(self._head(look), Text(), self._services(look), Text(), self._fleet(look), Text(), self._streams(look))

    def _head(self, look: Look) -> RenderableType:
        progress = progress_of(self.book, steps=self.steps, max_staleness=self.max_staleness)
        buffer = self.book.one("buffer")
        if progress.reward_train is not None:
            self._train[progress.depth] = progress.reward_train
        evals = [mean for _, _, mean in buffer.get("evals") or [] if mean is not None]
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(no_wrap=True, overflow="ellipsis")
        rows.add_row("step", f"{progress.depth} of {progress.steps}{'   finished' if progress.finished else ''}")
        state = buffer.get("state")
        if state:
            rows.add_row("state", Text(str(state), style="yellow"))
        rows.add_row("reward, held-out", curve(evals, progress.reward_held_out))
        rows.add_row("reward, train", curve([self._train[depth] for depth in sorted(self._train)], progress.reward_train))
        rows.add_row("versions", _convergence(look, progress.version))
        rows.add_row("staleness", _staleness(buffer, self.max_staleness))
        rows.add_row("rollout", f"{progress.trajectories_per_s:.0f} trajectories/s, {progress.tokens_per_s:.0f} tokens/s")
        rows.add_row(
            "samples",
            f"{buffer.get('open', 0)} open in {buffer.get('open_groups', 0)} groups, "
            f"{buffer.get('complete_groups', 0)} complete; dropped: {_reasons(buffer.get('dropped') or {})}",
        )
        rows.add_row("delta", f"{size(progress.delta_bytes)} a version")
        if progress.problem:
            rows.add_row("problem", Text(progress.problem, style="red"))
        return Group(Text(f"towline {self.run}", style="bold"), rows)

    def _services(self, look: Look) -> RenderableType:
        table = _table("service", "replica", "ready", "says", "seen")
        for status in look.statuses:
            ready = Text("yes", style="green") if status.ready else Text("no", style="yellow")
            table.add_row(status.service, status.replica, ready, status.reason, f"{max(look.at - status.at, 0):.0f} s ago")
        return table

    def _fleet(self, look: Look) -> RenderableType:
        """The replicas that are furthest behind first: they are the ones to look at."""
        table = _table("replica", "host", "engine", "state", "version", "slots", "prepare", "pause", "probe")
        ordered = sorted(look.replicas, key=lambda info: (-1 if info.version is None else info.version, info.replica))
        for info in ordered[:MOST_REPLICAS]:
            ack = look.acks.get(info.replica)
            state = Text(info.state, style="green" if info.state == "serving" else "red" if info.state == "failed" else "yellow")
            table.add_row(
                info.replica,
                info.host,
                info.engine,
                state if info.state == "serving" or not info.detail else state.append(f" {info.detail}"),
                "-" if info.version is None else str(info.version),
                f"{info.busy}/{info.slots}",
                "-" if ack is None else f"{1000 * ack.prepare_seconds:.0f} ms",
                "-" if ack is None else f"{1000 * ack.pause_seconds:.0f} ms",
                "-" if ack is None or ack.probe_max_abs_diff is None else f"{ack.probe_max_abs_diff:.1e}",
            )
        if len(ordered) > MOST_REPLICAS:
            table.add_row(f"… and {len(ordered) - MOST_REPLICAS} more", *[""] * 8)
        return table

    def _streams(self, look: Look) -> RenderableType:
        table = _table("stream", "messages", "bytes", "full")
        for key, state in look.streams.items():
            style = "red" if key == DEAD.key and state.messages else ""
            share = state.bytes / state.max_bytes if state.max_bytes > 0 else 0.0
            table.add_row(Text(key, style=style), Text(f"{state.messages:,}", style=style), size(state.bytes), f"{share:.0%}")
        return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    return table


def _convergence(look: Look, head: int | None) -> str:
    """How many replicas serve which version, newest first; how long versions took to reach all."""
    fleet = fleet_of(look.replicas, look.acks.values(), now=look.at)
    newest = list(fleet.serving.items())[:MOST_VERSIONS]
    shown = [f"{count} on {version}" for version, count in newest]
    older = sum(fleet.serving.values()) - sum(count for _, count in newest)
    if older:
        shown.append(f"{older} on older ones")
    text = f"head {'-' if head is None else head}; replicas: {', '.join(shown) or 'none serves'}"
    if fleet.publish_to_all_p50_seconds is not None and fleet.publish_to_all_p99_seconds is not None:
        text += f"; to all in {fleet.publish_to_all_p50_seconds:.2f} s (p99 {fleet.publish_to_all_p99_seconds:.2f} s)"
    if fleet.slowest is not None:
        text += f"; {fleet.slowest} is {fleet.slowest_behind_seconds:.0f} s behind"
    return text


def _staleness(buffer: dict[str, Any], bound: int) -> str:
    found = buffer.get("staleness") or {}
    return f"{found.get('mean', 0.0):.2f} mean, {found.get('p99', 0):g} p99, {found.get('max', 0):g} max, {bound} allowed"


def _reasons(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "none"


async def read_look(bus: Bus) -> Look:
    """Raises `UnavailableError` where the bus is away for longer than LOOK_SECONDS."""
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            statuses, replicas, acks = await asyncio.gather(
                bus.kv(STATUS).items(), bus.kv(REPLICAS).items(), bus.kv(ACKS).items()
            )
            streams = await asyncio.gather(*map(bus.stream_state, _QUEUES))
    except TimeoutError:
        raise UnavailableError(f"the bus gave no answer for {LOOK_SECONDS:g} s", code="bus_silent") from None
    infos = []
    for value in replicas.values():
        with contextlib.suppress(MalformedError):  # a newer Towline's: told by its status at least
            infos.append(decode_replica(value))
    return Look(
        at=time.time(),
        statuses=decode_statuses(statuses),
        replicas=infos,
        acks={ack.replica: ack for ack in decode_acks(acks.values())},
        streams={spec.key: state for spec, state in zip(_QUEUES, streams, strict=True)},
    )


async def watch(bus: Bus, screen: Screen, console: Console, *, once: bool) -> None:
    """Draw every second until interrupted; `once`, or off a terminal: one picture."""
    if once or not console.is_terminal:
        screen.draw(await read_look(bus))
        await asyncio.sleep(EVERY_SECONDS)  # a rate needs two looks
        console.print(screen.draw(await read_look(bus)))
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            try:
                live.update(screen.draw(await read_look(bus)), refresh=True)
            except TowlineError as error:
                live.update(Text(f"{error.message}; trying again", style="yellow"), refresh=True)
            await asyncio.sleep(EVERY_SECONDS)
