"""`towline versions gc`: a pass of the garbage collector; with --dry-run what it would do and why; with --every many."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from towline.cli.numbers import finite
from towline.errors import TowlineError, UnavailableError, UsageError
from towline.runtime.terminal import say

if TYPE_CHECKING:
    from towline.config import Settings
    from towline.local.run_directory import RunDirectory
    from towline.store.claims import Hold
    from towline.store.log import Log
    from towline.store.objects import ObjectStore
    from towline.store.retention import Plan

DEFAULT_GRACE = "1h"
HOLD_SECONDS = 600.0
REPLICA_HOLD_SECONDS = 600.0
PREPARES_IN_A_GRACE = 4

Grace = Annotated[str, typer.Option(help="How long what nobody needs stays all the same: 90s, 30m, 2h, 1d.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]


def gc(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_TOML", help="A run's name (of one in ./runs) or its TOML file.")],
    grace: Grace = DEFAULT_GRACE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would happen and why; change nothing.")] = False,
    keep_anchors: Annotated[int, typer.Option(min=1, help="The line's newest anchors that stay.")] = 2,
    keep_checkpoints: Annotated[int, typer.Option(min=2, help="The line's newest checkpoints that stay.")] = 2,
    every: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            callback=finite,
            metavar="SECONDS",
            help="A pass each so many seconds, one line each, until the run ends or SIGTERM.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Give up what nobody needs, and delete what was given up a grace ago.

    What stays, and why the rest may go: docs/design/011-retention.md.
    """
    import structlog

    from towline.local.run_directory import find_run

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    directory, settings = find_run(target)
    asked = seconds(grace)
    if every is None:
        found, summary, _ = _pass(directory, settings, asked, keep_anchors, keep_checkpoints, dry_run)
        _tell(found, summary, as_json)
        return
    if dry_run:
        raise UsageError("--dry-run makes one pass: leave --every out", code="gc_options")
    _follow(every, lambda: _pass(directory, settings, asked, keep_anchors, keep_checkpoints, False), as_json)


def _follow(every: float, one_pass: Callable[[], tuple[Plan, dict[str, Any], bool]], as_json: bool) -> None:
    """Passes until one finds that the run has ended, or SIGTERM or SIGINT, which let the pass that is under way end. A store or
    a bus that doesn't answer is told and asked again at the next pass; what only a person can mend ends it."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while not stop.is_set():
            ended = False
            try:
                found, summary, ended = one_pass()
                summary |= {"waiting": len(found.of("wait")) + summary["condemned"], "run_ended": ended}
            except UnavailableError as error:
                summary = {"failed": error.code, "reason": error.message}
            line = json.dumps({"at": time.time(), **summary}) if as_json else _line(summary)
            print(line, flush=True)
            if ended:
                return
            stop.wait(every)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _line(summary: Mapping[str, Any]) -> str:
    from towline.report.progress import size

    clock = time.strftime("%H:%M:%S")
    if "failed" in summary:
        return f"{clock}  {summary['failed']}: {summary['reason']}; tried again at the next pass"
    text = f"{clock}  deleted {summary['deleted']} ({size(summary['freed_bytes'])}), condemned {summary['condemned']}, "
    text += (
        f"lifted {summary['lifted']}, waiting {summary['waiting']}; registry {summary['registry']}, holds {len(summary['holds'])}"
    )
    text += f"; LOST {', '.join(summary['lost'])}" if summary["lost"] else ""
    return text + ("; the run has ended" if summary["run_ended"] else "")


def _pass(
    directory: RunDirectory, settings: Settings, grace: float, anchors: int, checkpoints: int, dry_run: bool
) -> tuple[Plan, dict[str, Any], bool]:
    """(the plan, what was done, whether the run has ended) of one pass."""
    from towline.access.roles import GC
    from towline.local.access import open_objects
    from towline.store.collect import collect, survey
    from towline.store.log import Log
    from towline.store.retention import Rules

    readers, longest, ended = _replicas(directory, settings)
    chosen = max(grace, PREPARES_IN_A_GRACE * longest)
    rules = Rules(grace_seconds=chosen, anchors=anchors, checkpoints=checkpoints)
    with open_objects(directory, settings, GC) as objects:
        log = Log(objects, settings.run.name)
        log.refresh()
        if dry_run:
            found = survey(objects, log, rules, now=time.time(), holds=readers or ())
            summary: dict[str, Any] = {}
        else:
            done = collect(objects, log, rules, holds=readers or ())
            found = done.plan
            summary = {
                "condemned": done.condemned,
                "lifted": done.lifted,
                "deleted": done.deleted,
                "freed_bytes": done.freed_bytes,
            }
    summary |= {
        "grace_seconds": chosen,
        "registry": "read" if readers is not None else "unreachable",
        "holds": [hold.reader for hold in readers or ()],
        "lost": {str(version): why for version, why in found.lost.items()},
    }
    return found, summary, ended


def seconds(text: str) -> float:
    """90s, 30m, 2h or 1d."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not found:
        raise UsageError(f"{text!r}: give a time such as 90s, 30m, 2h or 1d", code="duration")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


@contextmanager
def held(objects: ObjectStore, log: Log, version: int, name: str | None = None) -> Iterator[str]:
    """The version and the deltas after it are held for this process meanwhile, renewed by a thread. The reader's name."""
    from towline.store.claims import Hold, put_hold, release_hold

    reader = name or re.sub(r"[^A-Za-z0-9_-]", "-", f"cli-{socket.gethostname()}-{os.getpid()}-{version}")[:100]
    over = threading.Event()

    def renew() -> None:
        while not over.wait(HOLD_SECONDS / 4):
            try:
                put_hold(objects, log.run, Hold(reader=reader, version=version, until=time.time() + HOLD_SECONDS))
            except TowlineError as error:  # the grace protects the reader meanwhile
                import structlog

                structlog.get_logger(__name__).warning("hold_not_renewed", reason=error.message)

    try:
        put_hold(objects, log.run, Hold(reader=reader, version=version, until=time.time() + HOLD_SECONDS))
    except UsageError as error:
        if error.code != "store_permission":
            raise
        yield reader  # who may only read holds nothing: the grace is what protects it
        return
    threading.Thread(target=renew, name="towline-hold", daemon=True).start()
    try:
        yield reader
    finally:
        over.set()
        release_hold(objects, log.run, reader)


def _replicas(directory: RunDirectory, settings: Settings) -> tuple[tuple[Hold, ...] | None, float, bool]:
    """(what the registered replicas hold, the longest prepare that they have acknowledged, whether the run has ended);
    (None, 0, False) without a bus."""
    from towline.access.roles import GC
    from towline.bus.topology import ACKS, REPLICAS
    from towline.contract.policy import decode_ack, decode_replica
    from towline.local.access import open_run
    from towline.runtime.run_end import run_has_ended
    from towline.store.claims import Hold

    async def ask() -> tuple[tuple[Hold, ...], float, bool]:
        async with open_run(directory, settings, GC) as access:
            entries = [decode_replica(data) for data in (await access.bus.kv(REPLICAS).items()).values()]
            acks = [decode_ack(data) for data in (await access.bus.kv(ACKS).items()).values()]
            ended = await run_has_ended(access.bus, settings.run.steps)
        until = time.time() + REPLICA_HOLD_SECONDS
        found = [Hold(reader=f"replica-{e.replica}", version=e.version, until=until) for e in entries if e.version is not None]
        return tuple(found), max((ack.prepare_seconds for ack in acks), default=0.0), ended

    try:
        return asyncio.run(ask())
    except TowlineError as error:
        print(f"the registry can't be read ({error.code}): replicas are protected by the grace alone", file=sys.stderr)
        return None, 0.0, False


def _tell(plan: Plan, summary: dict[str, Any], as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {
            "action": v.action,
            "kind": v.thing.kind,
            "version": v.thing.version,
            "folder": v.thing.folder,
            "bytes": v.thing.nbytes,
            "reason": v.reason,
        }
        for v in plan.verdicts
    ]
    if as_json:
        print(json.dumps({**summary, "verdicts": rows}))
        return
    from towline.report.progress import size

    for row in rows:
        say(f"{row['action']:8} {row['kind']:10} {size(row['bytes']):>9}  {row['folder']}  ({row['reason']})")
    for key, value in summary.items():
        print(f"{key:16} {value}")
