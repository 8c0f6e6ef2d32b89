"""Looks at bus and store together: whether they are the halves of one run, of one moment. It writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from towline.bus.client import Bus
from towline.bus.topology import CONTROL
from towline.config import Settings
from towline.contract.entries import VersionEntry
from towline.doctor.bus import PATIENCE_SECONDS
from towline.doctor.finding import Finding, fault, ok
from towline.errors import MissingError, TowlineError
from towline.runtime.halves import what_is_gone
from towline.store.log import Log
from towline.store.objects import open_store

_PAIR = "halves"


async def look_at_halves(settings: Settings) -> AsyncIterator[Finding]:
    """Nothing where one of them can't be read: their own looks say so. At a site the store may be a mirror, which lags."""
    name = settings.run.name
    if settings.bus.site:
        return
    try:
        log = Log(open_store(settings.store), name)
        bus = await Bus.connect(settings.bus, run=name, client_name=f"doctor-{name}", patience_seconds=PATIENCE_SECONDS)
    except TowlineError:
        return
    try:
        yield await _compare(bus, log)
    except MissingError:
        yield ok(_PAIR, "the bus has no streams of the run yet: nothing to compare")
    except TowlineError:
        return
    finally:
        await bus.close()


async def _compare(bus: Bus, log: Log) -> Finding:
    # The LOG first: a batch stands in CONTROL before a version of it does.
    await asyncio.to_thread(log.refresh)
    end = (await bus.stream_state(CONTROL)).last_sequence
    head = log.entry(log.lineage.latest) if log.lineage.path() else None
    if isinstance(head, VersionEntry) and head.batch_cursor > end:
        return fault(
            _PAIR,
            f"version {head.number} was trained on the batch at CONTROL {head.batch_cursor}, and CONTROL ends at {end}: "
            "the bus is older than the bucket",
            f"restore the bus of the same moment, or towline run fork {log.run} --from latest; services stop by themselves",
        )
    if (gone := await what_is_gone(bus, log)) is not None:
        return fault(
            _PAIR,
            f"{gone}: the bucket is older than the bus",
            "start nothing; bring back the bucket's newest state (its own versioning, a mirror), or both halves of one "
            f"moment; else towline run fork {log.run} --from latest",
        )
    return ok(_PAIR, "bus and bucket are of one moment, as far as their newest records tell")
