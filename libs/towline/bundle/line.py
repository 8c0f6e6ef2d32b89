"""The batches that made the line: for each version the CONTROL records it consumed, in the order they were trained in.

A version of epoch E on base B consumed E's batches for the depths from B's on up to its own: several where steps coalesced.
A fork's void batches carry another epoch, so they are never taken for the ones that count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from towline.bundle.source import Source
from towline.bus.topology import CONTROL
from towline.contract.control import BatchRecord, decode_control
from towline.contract.entries import VersionEntry
from towline.errors import MissingError
from towline.store.log import Log


@dataclass(frozen=True, slots=True)
class BatchAt:
    """A batch record and its sequence in CONTROL."""

    record: BatchRecord
    sequence: int


@dataclass(frozen=True, slots=True)
class Step:
    """A version and its batches; `lost` are the depths whose batch isn't in CONTROL (any more)."""

    entry: VersionEntry
    batches: tuple[BatchAt, ...]
    lost: tuple[int, ...]


Batches = Mapping[tuple[int, int], BatchAt]
"""(epoch, for_depth) -> its batch."""


async def read_batches(source: Source) -> dict[tuple[int, int], BatchAt]:
    """Every batch of CONTROL, void ones included."""
    found: dict[tuple[int, int], BatchAt] = {}
    async with contextlib.aclosing(source.read(CONTROL, subjects=[source.topology.control("batch")])) as messages:
        async for message in messages:
            record = decode_control(message.data)
            if isinstance(record, BatchRecord):
                found[record.epoch, record.for_depth] = BatchAt(record, message.sequence)
    return found


def steps(log: Log, batches: Batches, start: int = 0, end: int | None = None) -> list[Step]:
    """What leads from version `start` to `end` (None: the line's latest). `MissingError` where it doesn't."""
    lineage = log.lineage
    found = []
    for number in lineage.chain(lineage.latest if end is None else end, start):
        entry = log.version(number)
        depths = range(lineage.depth(entry.base), entry.depth)
        known = [batches[entry.epoch, depth] for depth in depths if (entry.epoch, depth) in batches]
        lost = tuple(depth for depth in depths if (entry.epoch, depth) not in batches)
        found.append(Step(entry, tuple(known), lost))
    return found


def replay_start(
    log: Log, batches: Batches, first_trajectory: int, exists: Callable[[str], bool] = lambda checkpoint: True
) -> int | None:
    """The oldest version that a replay can start from: 0, or one with a checkpoint, from which on every batch and row is there.

    first_trajectory: TRAJECTORY's first sequence; what is below it was purged. exists: whether a checkpoint is still stored.
    None where the line ends in a gap.
    """
    start: int | None = 0
    for step in steps(log, batches):
        if step.lost or is_purged(step, first_trajectory):
            start = None
        if start is None and step.entry.checkpoint is not None and exists(step.entry.checkpoint):
            start = step.entry.number
    return start


def is_purged(step: Step, first_trajectory: int) -> bool:
    """Whether one of the step's rows stands below TRAJECTORY's first sequence."""
    return any(row.sequence < first_trajectory for batch in step.batches for row in batch.record.rows)


def checkpoint_of(log: Log, version: int) -> str | None:
    """The checkpoint to start from at `version`; None at 0. `MissingError` where it has none."""
    if version == 0:
        return None
    name = log.version(version).checkpoint
    if name is None:
        having = [number for number in log.lineage.path() if number and log.version(number).checkpoint]
        listed = ", ".join(map(str, having[-8:])) or "none; start at 0"
        raise MissingError(
            f"version {version} has no checkpoint; those of the line that have one: {listed}", code="no_checkpoint"
        )
    return name
