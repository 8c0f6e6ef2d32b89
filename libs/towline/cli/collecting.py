"""`towline versions gc`: one pass of the garbage collector, or with --dry-run what it would do and why."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer

from towline.errors import TowlineError, UsageError

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
    as_json: Json = False,
) -> None:
    """Give up what nobody needs, and delete what was given up a grace ago.

    What stays, and why the rest may go: docs/design/011-retention.md.
    """
    from towline.local.access import open_objects
    from towline.local.run_directory import find_run
    from towline.store.collect import collect, survey
    from towline.store.log import Log
    from towline.store.retention import Rules

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    directory, settings = find_run(target)
    readers, longest = _replicas(directory, settings)
    chosen = max(seconds(grace), PREPARES_IN_A_GRACE * longest)
    rules = Rules(grace_seconds=chosen, anchors=keep_anchors, checkpoints=keep_checkpoints)
    with open_objects(directory, settings) as objects:
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
    _tell(found, summary, as_json)


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


def _replicas(directory: RunDirectory, settings: Settings) -> tuple[tuple[Hold, ...] | None, float]:
    """(what the registered replicas hold, the longest prepare that they have acknowledged); (None, 0) without a bus."""
    from towline.bus.topology import ACKS, REPLICAS
    from towline.contract.policy import decode_ack, decode_replica
    from towline.local.access import open_run
    from towline.store.claims import Hold

    async def ask() -> tuple[tuple[Hold, ...], float]:
        async with open_run(directory, settings) as access:
            entries = [decode_replica(data) for data in (await access.bus.kv(REPLICAS).items()).values()]
            acks = [decode_ack(data) for data in (await access.bus.kv(ACKS).items()).values()]
        until = time.time() + REPLICA_HOLD_SECONDS
        found = [Hold(reader=f"replica-{e.replica}", version=e.version, until=until) for e in entries if e.version is not None]
        return tuple(found), max((ack.prepare_seconds for ack in acks), default=0.0)

    try:
        return asyncio.run(ask())
    except TowlineError as error:
        print(f"the registry can't be read ({error.code}): replicas are protected by the grace alone", file=sys.stderr)
        return None, 0.0


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
    from towline.local.progress import size

    for row in rows:
        print(f"{row['action']:8} {row['kind']:10} {size(row['bytes']):>9}  {row['folder']}  ({row['reason']})")
    for key, value in summary.items():
        print(f"{key:16} {value}")
