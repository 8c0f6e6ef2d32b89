"""Looks at the version store: whether it can be used, refuses a second conditional put, and holds what its LOG names."""

from __future__ import annotations

import time
from collections.abc import Iterator

from towline.config import StoreSettings
from towline.doctor.finding import Finding, fault, ok, warning
from towline.errors import CorruptError, InvariantError, MissingError, TowlineError, UsageError
from towline.store.collect import store_time
from towline.store.log import Log
from towline.store.manifest import read_manifest
from towline.store.objects import ObjectStore, open_store

CLOCK_SECONDS = 5.0
"""S3 tells whole seconds. The grace of what retention deletes is counted by the store's clock."""


def look_at_store(settings: StoreSettings, run: str) -> Iterator[Finding]:
    """Findings; it writes the objects `towline-check` and the run's clock, as every service that may write does."""
    try:
        objects = open_store(settings)
        objects.check()
    except UsageError as error:
        yield fault("store", error.message, "correct store.url, store.endpoint or the keys; the bucket must exist")
        return
    except TowlineError as error:
        yield fault("store", error.message, "start the S3 server, or correct store.endpoint; is a firewall between?")
        return
    yield ok("store", f"{objects.url} takes objects, and refuses a second one under the same key")
    yield _clock(objects, run)
    yield from _versions(objects, run)


def _clock(objects: ObjectStore, run: str) -> Finding:
    asked = time.time()
    skew = store_time(objects, run) - (asked + time.time()) / 2
    if abs(skew) > CLOCK_SECONDS:
        return warning("clock", f"the store's clock is {skew:+.0f} s off this machine's", "run NTP on both")
    return ok("clock", f"the store's is within {CLOCK_SECONDS:g} s of this machine's")


def _versions(objects: ObjectStore, run: str) -> Iterator[Finding]:
    log = Log(objects, run)
    try:
        log.refresh()
    except (CorruptError, InvariantError) as error:
        yield fault("versions", error.message, "stop the run's services: its LOG isn't what it was; restore it from a backup")
        return
    if not log.next_number:
        yield ok("versions", "no LOG yet: the trainer's first start makes entry 0")
        return
    head = log.lineage.latest
    if head == 0:
        yield ok("versions", "entry 0, the base model, and no version yet")
        return
    entry = log.version(head)
    try:
        manifest = read_manifest(objects, entry.folder, entry.manifest_digest)
        missing = [part.name for part in manifest.parts if objects.stat(f"{entry.folder}/{part.name}") is None]
    except (MissingError, CorruptError) as error:
        yield fault("versions", f"version {head}: {error.message}", f"towline versions verify {run}; quarantine what is bad")
        return
    if missing:
        yield fault("versions", f"version {head} lacks {', '.join(missing)}", f"towline versions verify {run}")
    else:
        yield ok(
            "versions", f"{head} at depth {entry.depth} is whole in the store; `towline versions verify {run}` checks its bytes"
        )
