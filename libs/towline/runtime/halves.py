"""Whether the bucket is as new as the bus: the two halves of a run, which a restored backup may have of different moments.

Whoever writes to the bus about an entry of the LOG has seen it stand there. So a bucket that lacks an entry which the bus
names, or has another in its place, has gone back in time, and whoever went on would give numbers a second time. What is asked
is the newest word of each kind, five small reads: `policy.committed` and `policy.opened`, and CONTROL's fork, batch and eval.
The other way round, a bus older than the bucket, is told by CONTROL's end (`stream_regressed`, `bus_mismatch`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from towline.bus.client import Bus
from towline.bus.topology import CONTROL, POLICY
from towline.contract.control import BatchRecord, EvalRecord, ForkRecord, decode_control
from towline.contract.entries import BaseEntry, LogEntry, OpenEntry, VersionEntry
from towline.contract.policy import Committed, Opened, decode_policy
from towline.errors import InvariantError, MalformedError
from towline.store.log import Log

STORE_REGRESSED = "store_regressed"
WAY_OUT = (
    "the bucket is older than the bus, nothing was changed: bring back the bucket's newest state (its own versioning, a mirror), "
    "or both halves of one moment, or fork a new run from a version"
)


@dataclass(frozen=True, slots=True)
class Named:
    """An entry of the LOG that the bus speaks of: where it does, what it says stands there, and whether an entry is that."""

    where: str
    number: int
    what: str
    fits: Callable[[LogEntry], bool]


async def check_store_as_new(bus: Bus, log: Log) -> None:
    """`InvariantError` (store_regressed) where the LOG is older than what the bus says of it. Reads the LOG to its head."""
    if (found := await what_is_gone(bus, log)) is not None:
        raise InvariantError(f"run {log.run}: {found}; {WAY_OUT}", code=STORE_REGRESSED)


async def what_is_gone(bus: Bus, log: Log) -> str | None:
    """The first entry that the bus names and the LOG hasn't, in words; None where both agree."""
    # First the words, then the LOG: an entry stands before anybody speaks of it.
    named = [one async for one in _named(bus)]
    await asyncio.to_thread(log.refresh)
    for one in sorted(named, key=lambda one: one.number):
        if one.number >= log.next_number:
            end = f"ends at {log.next_number - 1}" if log.next_number else "is empty"
            return f"{one.where} names LOG entry {one.number} ({one.what}), and the bucket's LOG {end}"
        if not one.fits(log.entry(one.number)):
            return f"{one.where} names LOG entry {one.number} as {one.what}, and the bucket's LOG has another entry there"
    return None


async def _named(bus: Bus) -> AsyncIterator[Named]:
    topology = bus.topology
    for kind in ("committed", "opened"):
        message = await bus.last(POLICY, topology.policy(kind))
        if message is not None and (one := _of_policy(message.data, f"policy.{kind}")) is not None:
            yield one
    for kind in ("fork", "batch", "eval"):
        message = await bus.last(CONTROL, topology.control(kind))
        if message is not None and (one := _of_control(message.data, f"CONTROL {message.sequence} ({kind})")) is not None:
            yield one


def _of_policy(data: bytes, where: str) -> Named | None:
    try:
        said = decode_policy(data)
    except MalformedError:  # whoever acts on it says so
        return None
    if isinstance(said, Committed):
        number, epoch, write_id = said.number, said.epoch, said.write_id
        return Named(
            where, number, f"the version of epoch {epoch} with WRITE_ID {write_id}",
            lambda entry: isinstance(entry, VersionEntry) and (entry.epoch, entry.write_id) == (epoch, write_id),
        )  # fmt: skip
    return _epoch(where, said.epoch) if isinstance(said, Opened) else None


def _of_control(data: bytes, where: str) -> Named | None:
    try:
        record = decode_control(data)
    except MalformedError:
        return None
    if isinstance(record, ForkRecord):
        base, depth = record.base, record.depth
        return Named(
            where, record.epoch, f"an epoch opened on version {base} at depth {depth}",
            lambda entry: isinstance(entry, OpenEntry) and (entry.base, entry.depth) == (base, depth),
        )  # fmt: skip
    if isinstance(record, BatchRecord):
        return _epoch(where, record.epoch)
    if isinstance(record, EvalRecord):
        depth = record.depth
        return Named(where, record.version, f"a version at depth {depth}", lambda entry: _depth(entry) == depth)
    return None


def _epoch(where: str, number: int) -> Named:
    return Named(where, number, "the start of an epoch", lambda entry: isinstance(entry, OpenEntry))


def _depth(entry: LogEntry) -> int | None:
    """Of a version; None of what is none."""
    if isinstance(entry, BaseEntry):
        return 0
    return entry.depth if isinstance(entry, VersionEntry) else None
