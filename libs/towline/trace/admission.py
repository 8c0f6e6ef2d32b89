"""Where in CONTROL a sample was admitted, found by halving: a buffer admits groups in the order of their numbers, the tasks of
each next to one another. So it costs some dozens of messages, however long the run is. What isn't found so is looked for in all
tasks, since a replay's run has them in the order of its batches."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from towline.bundle.source import Source
from towline.bus.client import Message
from towline.bus.topology import CONTROL
from towline.contract.control import TaskRecord, decode_control

_AT_A_TIME, _MOST_AT_A_TIME = 4, 256
"""Messages that are fetched together: the first few, since most are tasks, then twice as many each time."""


async def admission(source: Source, group: int, sample: int, first: int, last: int) -> tuple[Message, TaskRecord] | None:
    """The sample's task and its message, of sequences `first` to `last` of CONTROL; None where it isn't there."""
    low, high = first, last
    while high - low > _AT_A_TIME:  # the group's first task isn't before low; a task behind high is the group's or a later one's
        middle = (low + high) // 2
        async with contextlib.aclosing(_tasks(source, middle, high)) as tasks:
            found = await anext(tasks, None)
        if found is not None and found[1].task.group < group:
            low = found[0].sequence + 1
        else:
            high = middle - 1
    async with contextlib.aclosing(_tasks(source, low, last)) as tasks:
        async for message, record in tasks:
            if (record.task.group, record.task.sample) == (group, sample):
                return message, record
            if record.task.group > group:
                break
    return await _among_all(source, group, sample, first)


async def _among_all(source: Source, group: int, sample: int, first: int) -> tuple[Message, TaskRecord] | None:
    subjects = [source.topology.subject("control.task.>")]
    async with contextlib.aclosing(source.read(CONTROL, start=first, subjects=subjects)) as messages:
        async for message in messages:
            record = decode_control(message.data)
            if isinstance(record, TaskRecord) and (record.task.group, record.task.sample) == (group, sample):
                return message, record
    return None


async def _tasks(source: Source, start: int, end: int) -> AsyncGenerator[tuple[Message, TaskRecord]]:
    """The tasks of sequences `start` to `end`, in order."""
    count = _AT_A_TIME
    while start <= end:
        sequences = range(start, min(start + count, end + 1))
        for message in await source.get_many(CONTROL, sequences):
            if message is not None and isinstance(record := decode_control(message.data), TaskRecord):
                yield message, record
        start, count = sequences.stop, min(2 * count, _MOST_AT_A_TIME)
