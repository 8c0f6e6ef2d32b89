"""CONTROL as the trainer reads it: the batches of its own epoch, each depth once and in order, up to the run's end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

from towline.bus.client import Bus
from towline.bus.topology import CONTROL
from towline.contract.control import BatchRecord, EndRecord, ForkRecord, decode_control
from towline.errors import InvariantError


@dataclass(frozen=True, slots=True)
class BatchAt:
    """A batch record and its sequence in CONTROL, which is the cursor of whatever contains it."""

    record: BatchRecord
    sequence: int
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Feed:
    """Batches of `epoch` from `depth` on; the first may stand anywhere after `cursor`."""

    bus: Bus
    epoch: int
    depth: int
    cursor: int
    opened_at: int
    """CONTROL's last sequence just before the epoch was opened: an `end` up to there was another epoch's."""

    async def batches(self) -> AsyncGenerator[BatchAt | EndRecord, None]:
        """Each batch, then the `end` record once the run has ended. `InvariantError` where a depth is missing or comes twice."""
        topology = self.bus.topology
        subjects = [topology.control(kind) for kind in ("batch", "fork", "end")]
        wanted = self.depth
        async with contextlib.aclosing(self.bus.read(CONTROL, start=self.cursor + 1, subjects=subjects)) as messages:
            async for message in messages:
                record = decode_control(message.data)
                if isinstance(record, ForkRecord) and record.epoch == self.epoch and record.depth != self.depth:
                    raise InvariantError(
                        f"CONTROL {message.sequence}: fork of epoch {self.epoch} at depth {record.depth}, opened at {self.depth}",
                        code="fork_depth",
                    )
                if isinstance(record, EndRecord) and message.sequence > self.opened_at:
                    yield record
                    return
                if isinstance(record, BatchRecord) and record.epoch == self.epoch:
                    if record.for_depth != wanted:
                        raise InvariantError(
                            f"CONTROL {message.sequence}: a batch for depth {record.for_depth} where {wanted} is due",
                            code="batch_order",
                        )
                    wanted += 1
                    yield BatchAt(record, message.sequence, message.headers)
