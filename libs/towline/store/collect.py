"""The garbage collector: gives up what nobody needs, waits out the grace, deletes. And pinning, which has to win against it.

Any number of collectors may run, and each may die anywhere: a tombstone only promises that deletion may come, a folder loses the
file that makes it whole first, and what is left over is found again by the next pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import structlog

from towline.errors import MissingError, UnavailableError, UsageError
from towline.store import claims, keys
from towline.store.claims import Hold, Pin
from towline.store.log import Log
from towline.store.objects import ObjectStore, settle
from towline.store.retention import Plan, Rules, Thing, expired, needs, plan
from towline.store.stock import take_stock, tombs_of_nothing

_log = structlog.get_logger("towline.gc")


@dataclass(slots=True)
class Collected:
    """What a pass did."""

    plan: Plan
    condemned: int = 0
    lifted: int = 0
    deleted: int = 0
    freed_bytes: int = 0
    expired_holds: int = 0
    spared: list[str] = field(default_factory=list)
    """Folders that were to be deleted and whose tombstone was gone by then."""


def store_time(objects: ObjectStore, run: str) -> float:
    """Unix time by the store's clock, which is what ages are counted in."""
    objects.put(keys.clock(run), b"now")
    found = objects.stat(keys.clock(run))
    if found is None:
        raise UnavailableError(f"{objects.url}: {keys.clock(run)} was written and isn't there", code="store_unavailable")
    return found.modified


def collect(objects: ObjectStore, log: Log, rules: Rules, *, now: float | None = None, holds: tuple[Hold, ...] = ()) -> Collected:
    """One pass. `holds`: of readers that the store doesn't know of (the registry's replicas).

    `now`: by the store's clock; asked of it unless given. Needs a store user that may delete.
    """
    now = store_time(objects, log.run) if now is None else now
    stock = take_stock(objects, log, holds)
    done = Collected(plan(log, stock, rules, now))
    for verdict in done.plan.of("lift"):
        objects.delete(keys.tombstone(log.run, verdict.thing.folder))
        done.lifted += 1
        _log.info("lifted", folder=verdict.thing.folder, reason=verdict.reason)
    for verdict in done.plan.of("condemn"):
        settle(objects, keys.tombstone(log.run, verdict.thing.folder), msgspec.json.encode({"reason": verdict.reason}))
        done.condemned += 1
        _log.info("condemned", folder=verdict.thing.folder, reason=verdict.reason)
    for verdict in done.plan.of("delete"):
        _delete(objects, log.run, verdict.thing, done)
    for key in tombs_of_nothing(objects, log, stock):
        objects.delete(key)
    for hold in stock.holds:
        if hold.until + rules.grace_seconds < now and hold not in holds:
            claims.release_hold(objects, log.run, hold.reader)
            done.expired_holds += 1
    return done


def survey(objects: ObjectStore, log: Log, rules: Rules, *, now: float, holds: tuple[Hold, ...] = ()) -> Plan:
    """What a pass would do at `now`; changes nothing."""
    return plan(log, take_stock(objects, log, holds), rules, now)


def pin(objects: ObjectStore, log: Log, record: Pin, rules: Rules, *, now: float | None = None) -> bool:
    """Keep the version, and take it and what it stands on out of the collector's hands. False where that pin stood already.

    `MissingError` where it can't be read any more, or where its grace is over, so that a collector may be deleting it.
    """
    now = store_time(objects, log.run) if now is None else now
    if record.version not in log.lineage:
        raise UsageError(f"version {record.version}: there is none; see `towline versions list`", code="version_missing")
    won = claims.create_pin(objects, log.run, record)
    things = needs(log, take_stock(objects, log), record.version)
    if things is None or any(expired(thing, rules, now) for thing in things):
        if won:
            objects.delete(keys.pin(log.run, record.version, record.name))
        raise MissingError(f"run {log.run}: version {record.version} is gone, or about to be: its files were given up",
                           code="version_gone")  # fmt: skip
    for thing in things:
        if thing.given_up is not None:
            objects.delete(keys.tombstone(log.run, thing.folder))
    return won


def _delete(objects: ObjectStore, run: str, thing: Thing, done: Collected) -> None:
    # Someone may have lifted it since this pass took stock.
    if objects.stat(keys.tombstone(run, thing.folder)) is None:
        done.spared.append(thing.folder)
        return
    for key in thing.keys:
        objects.delete(key)
    done.deleted += 1
    done.freed_bytes += thing.nbytes
    _log.info("deleted", folder=thing.folder, nbytes=thing.nbytes)
