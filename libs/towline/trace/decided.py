"""What CONTROL says of one sample, without the other samples' tasks, which are most of it.

The reading begins at the sample's admission. Batches are read until one holds the sample, and again from a fork on that voids it.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from towline.bundle.source import Source
from towline.bus.client import Message
from towline.bus.topology import CONTROL
from towline.contract.codec import plain
from towline.contract.control import (
    AdmitRecord,
    BatchRecord,
    CancelRecord,
    DropRecord,
    EvalRecord,
    ForkRecord,
    OverStale,
    Record,
    ReissueRecord,
    RequeueRecord,
    TaskRecord,
    decode_control,
)
from towline.contract.groups import is_external
from towline.contract.task import Task
from towline.trace.admission import admission
from towline.trace.life import Attempt, BatchSeen, Life

_FEW = ("admit", "cancel", "drop", "eval", "fork", "requeue")
"""Kinds of which there are few, and of which any may concern the sample until the end."""


async def read_decided(source: Source, life: Life, stored: bytes | None, task_sequence: int) -> None:
    """Fill in all that CONTROL has of the sample.

    stored: the digest of the trajectory that stands, None where none does; task_sequence: the task that it names, 0 where that
    isn't known.
    """
    await _Reader(source, life, stored).read(task_sequence)


class _Reader:
    def __init__(self, source: Source, life: Life, stored: bytes | None) -> None:
        self._source, self._life, self._stored = source, life, stored
        self._promised_at = 0
        """The record that promises the prompt again."""

    async def read(self, task_sequence: int) -> None:
        life, topology = self._life, self._source.topology
        admitted = await self._admission(task_sequence)
        start: int | None = life.control_begins
        if admitted is not None:
            self._take(*admitted)
            start = admitted[0].sequence + 1
        few = [*(topology.control(kind) for kind in _FEW), topology.subject("control.reissue.>")]
        while start is not None:
            start = await self._on(start, few if self._decided else [topology.control("batch"), *few])
        if self._promised_at:
            await self._prompt_again(self._promised_at)
        elif admitted is None and life.control_begins > 1 and not self._decided and not is_external(life.group):
            await self._prompt_again(life.control_begins)  # what became of the group may be purged, and this be left of it

    @property
    def _decided(self) -> bool:
        """Whether no batch is to come that holds the sample, unless a fork voids the one that stands."""
        life = self._life
        return life.batch is not None or life.dropped is not None or life.evaluated_version is not None

    async def _admission(self, task_sequence: int) -> tuple[Message, TaskRecord] | None:
        life = self._life
        if is_external(life.group) or 0 < task_sequence < life.control_begins:  # no task stands for it, or it's purged
            return None
        last = (await self._source.state(CONTROL)).last
        if life.control_begins <= task_sequence <= last:
            message = (await self._source.get_many(CONTROL, [task_sequence]))[0]
            record = None if message is None else decode_control(message.data)
            if message is not None and isinstance(record, TaskRecord) and self._is(record.task):
                return message, record
        return await admission(self._source, life.group, life.sample, life.control_begins, last)

    async def _on(self, start: int, subjects: list[str]) -> int | None:
        """Read on until batches begin or cease to be of interest: where to go on then; None at the end."""
        decided = self._decided
        async with contextlib.aclosing(self._source.read(CONTROL, start=start, subjects=subjects)) as messages:
            async for message in messages:
                self._take(message, decode_control(message.data))
                if self._decided != decided:
                    return message.sequence + 1
        return None

    async def _prompt_again(self, start: int) -> None:
        tasks = [self._source.topology.subject("control.task.>")]
        async with contextlib.aclosing(self._source.read(CONTROL, start=start, subjects=tasks)) as messages:
            async for message in messages:
                record = decode_control(message.data)
                if isinstance(record, TaskRecord) and record.requeues == self._life.group:
                    self._life.prompt_again_in = record.task.group
                    return

    def _is(self, sample: Task | AdmitRecord | CancelRecord) -> bool:
        return (sample.group, sample.sample) == (self._life.group, self._life.sample)

    def _take(self, message: Message, record: Record) -> None:
        life = self._life
        match record:
            case TaskRecord(task=task) if self._is(task):
                self._admitted(task)
                life.attempts.append(_attempt(task, message, None))
                life.prompt_of = record.requeues if isinstance(record.requeues, int) else None
            case ReissueRecord(task=task) if self._is(task):
                life.attempts.append(_attempt(task, message, record.reason))
            case AdmitRecord() if self._is(record):
                life.lane, life.group_size = record.lane, record.group_size
            case CancelRecord() if self._is(record):
                life.attempts = [
                    replace(attempt, cancelled=record.reason) if attempt.task_sequence == record.task_sequence else attempt
                    for attempt in life.attempts
                ]
            case DropRecord() if record.group == life.group:
                life.dropped, life.dropped_at = record.reason, message.at
                life.requeued = record.requeue is True
                life.admitted = not isinstance(record.offered, int)
                self._promised_at = message.sequence if life.requeued else self._promised_at
            case RequeueRecord() if record.group == life.group:
                life.requeued = True
                self._promised_at = message.sequence
            case BatchRecord():
                self._batched(message, record)
            case ForkRecord():
                life.batches = [
                    replace(batch, void_by=record.epoch)
                    if batch.void_by is None and batch.for_depth >= record.depth and batch.epoch != record.epoch
                    else batch
                    for batch in life.batches
                ]
            case EvalRecord():
                if any((row.group, row.sample) == (life.group, life.sample) for row in record.rows):
                    life.evaluated_version, life.evaluated_mean = record.version, record.mean
            case _:
                pass

    def _admitted(self, task: Task) -> None:
        life, ref = self._life, task.prompt_ref
        life.lane, life.group_size = task.lane, task.group_size
        life.prompt = {
            "source": ref.source, "epoch": ref.epoch, "index": ref.index, "environment": task.environment,
            "reference": task.reference, "tokens": task.prompt_tokens.tolist(), "sampling": plain(task.sampling),
            "seed": task.seed,
        }  # fmt: skip

    def _batched(self, message: Message, record: BatchRecord) -> None:
        life = self._life
        said = record.over_stale if isinstance(record.over_stale, OverStale) else None
        over = {} if said is None else {item.row: item.tokens for item in said.rows}
        for place, row in enumerate(record.rows):
            if (row.group, row.sample) == (life.group, life.sample):
                life.batches.append(
                    BatchSeen(
                        sequence=message.sequence, epoch=record.epoch, for_depth=record.for_depth, at=record.at,
                        reward=row.reward, least_depth=row.least_depth, rows=len(record.rows), void_by=None,
                        same_bytes=row.digest == self._stored, over_stale_tokens=over.get(place, 0),
                        over_stale=said.mode if said is not None and place in over else None,
                    )
                )  # fmt: skip


def _attempt(task: Task, message: Message, reason: str | None) -> Attempt:
    return Attempt(
        task_sequence=message.sequence,
        number=task.attempt,
        at=task.admitted_at if reason is None else message.at,
        reissued=reason,
        not_before_depth=task.not_before_depth,
        exact_version=task.exact_version,
        deadline=task.deadline,
    )
