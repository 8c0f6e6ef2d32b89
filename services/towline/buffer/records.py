"""Decided units as what is appended: signed, with their subjects, joined into atomic batches that never split a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from towline.buffer.view import Unit
from towline.bus.topology import MAX_ATOMIC_MESSAGES, Topology
from towline.contract.codec import encode
from towline.contract.control import Record, ReissueRecord, TaskRecord

MAX_CHUNK_BYTES = 16 << 20
"""Of one atomic batch, as far as whole units allow."""


@dataclass(slots=True)
class Chunk:
    """One atomic append."""

    records: list[Record] = field(default_factory=list)
    messages: list[tuple[str, bytes]] = field(default_factory=list)
    nbytes: int = 0

    @property
    def kinds(self) -> dict[str, None]:
        """The records' kinds, each once, in order."""
        return dict.fromkeys(str(record.__struct_config__.tag) for record in self.records)


def chunks(units: Iterable[Unit], topology: Topology, stamp: Callable[[], str]) -> Iterator[Chunk]:
    """The units in their order, as few atomic appends as the limits allow. `stamp` gives each record its `writer`."""
    chunk = Chunk()
    for unit in units:
        records = [replace(record, writer=stamp()) for record in unit]
        messages = [(subject_of(record, topology), encode(record)) for record in records]
        nbytes = sum(len(data) for _, data in messages)
        too_many = len(chunk.messages) + len(messages) > MAX_ATOMIC_MESSAGES
        if chunk.messages and (too_many or chunk.nbytes + nbytes > MAX_CHUNK_BYTES):
            yield chunk
            chunk = Chunk()
        chunk.records.extend(records)
        chunk.messages.extend(messages)
        chunk.nbytes += nbytes
    if chunk.messages:
        yield chunk


def subject_of(record: Record, topology: Topology) -> str:
    """Where the record is published: tasks and re-issues on their lane, anything else by its kind."""
    if isinstance(record, TaskRecord):
        return topology.task(record.task.lane, record.task.exact_version, record.task.issued_to)
    if isinstance(record, ReissueRecord):
        return topology.reissue(record.task.lane, record.task.exact_version, record.task.issued_to)
    return topology.control(str(record.__struct_config__.tag))
