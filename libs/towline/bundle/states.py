"""What became of every sample, from one pass over CONTROL and the LOG: which of a run's trajectories were trained, which dropped.

`towline.trace` says the same of one sample, with the reasons; these are its words.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Literal, get_args

from towline.bundle.source import Source
from towline.bus.topology import CONTROL
from towline.contract.codec import digest
from towline.contract.control import BatchRecord, BatchRow, DropRecord, EvalRecord, ForkRecord, TaskRecord, decode_control

State = Literal["trained", "skipped", "missing", "batched", "evaluated", "dropped", "scored", "generated"]
"""skipped: its step changed nothing; missing: the bytes that its batch names aren't these; batched: no version of its batch is
committed yet; scored, generated: it waits for its group, for its score."""
STATES = get_args(State)


@dataclass(slots=True)
class States:
    """Of the samples whose trajectory is in the stream."""

    _batched: dict[tuple[int, int], tuple[BatchRecord, BatchRow]] = field(default_factory=dict)
    _evaluated: set[tuple[int, int]] = field(default_factory=set)
    _dropped: set[int] = field(default_factory=set)
    _environments: dict[int, str] = field(default_factory=dict)

    def state(self, source: Source, group: int, sample: int, data: bytes, *, scored: bool) -> State:
        """Of the sample whose trajectory has the bytes `data`."""
        found = self._batched.get((group, sample))
        if found is not None:
            return _batched(source, *found, data)
        if (group, sample) in self._evaluated:
            return "evaluated"
        if group in self._dropped:
            return "dropped"
        return "scored" if scored else "generated"

    def environment(self, group: int) -> str | None:
        """Of the group's tasks; None where it came from outside, or its admission isn't in CONTROL any more."""
        return self._environments.get(group)


async def read_states(source: Source) -> States:
    """All of the run's decisions."""
    found = States()
    topology = source.topology
    subjects = [topology.control(kind) for kind in ("batch", "eval", "drop", "fork")] + [topology.subject("control.task.>")]
    async with contextlib.aclosing(source.read(CONTROL, subjects=subjects)) as messages:
        async for message in messages:
            match decode_control(message.data):
                case BatchRecord() as record:
                    found._batched.update({(row.group, row.sample): (record, row) for row in record.rows})
                case ForkRecord() as fork:
                    found._batched = {
                        key: (record, row)
                        for key, (record, row) in found._batched.items()
                        if record.epoch == fork.epoch or record.for_depth < fork.depth
                    }
                case EvalRecord() as record:
                    found._evaluated.update((row.group, row.sample) for row in record.rows)
                case DropRecord() as record:
                    found._dropped.add(record.group)
                case TaskRecord(task=task):
                    found._environments[task.group] = task.environment
                case _:
                    pass
    return found


def _batched(source: Source, record: BatchRecord, row: BatchRow, data: bytes) -> State:
    lineage = source.log.lineage
    number = lineage.version_reaching(record.for_depth + 1)
    if number is None or lineage.epoch_of(number) != record.epoch:
        return "batched"
    if digest(data) != row.digest:
        return "missing"
    return "skipped" if record.for_depth in source.log.version(number).skipped else "trained"
