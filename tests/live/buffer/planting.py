"""A small run, written record by record into real streams and a real LOG, so that a test may spoil any one of them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from live.buffer.harness import Trainer, seed, trajectory_of
from towline.audit.report import AuditReport
from towline.audit.run import audit
from towline.buffer.records import subject_of
from towline.bus.client import Bus
from towline.config import Settings
from towline.contract.codec import digest, encode
from towline.contract.control import (
    BatchRecord,
    BatchRow,
    DropRecord,
    EndRecord,
    EvalRecord,
    EvalRow,
    ForkRecord,
    OverStale,
    Record,
    TaskRecord,
    WriterRecord,
)
from towline.contract.entries import OpenEntry
from towline.contract.outcome import Score
from towline.contract.task import Cursor, PromptRef, SamplingParams, Task, VersionSpan, pack_tokens
from towline.contract.trajectory import encode_trajectory
from towline.store.log import Log
from towline.store.objects import ObjectStore

SIZE = 2


@dataclass
class Planted:
    """Groups of two samples, batches of one group. What each step writes is right unless the caller says otherwise."""

    bus: Bus
    objects: ObjectStore
    settings: Settings
    writer: str = "b"
    count: int = 0
    tasks: dict[tuple[int, int], tuple[int, Task]] = field(default_factory=dict)
    rows: dict[tuple[int, int], BatchRow] = field(default_factory=dict)
    sequences: dict[tuple[int, int], int] = field(default_factory=dict)
    """(epoch, for_depth) -> the batch's place in CONTROL."""

    def __post_init__(self) -> None:
        self.trainer = Trainer(self.bus, self.objects, self.settings)

    async def control(self, record: Record) -> int:
        self.count += 1
        signed = replace(record, writer=f"{self.writer}/{self.count}")
        return await self.bus.publish(subject_of(signed, self.bus.topology), encode(signed))

    async def start(self) -> int:
        """Entry 0, the first epoch, the writer's and the fork's record."""
        await seed(self.objects, self.settings.run.name)
        await self.control(WriterRecord(writer="", at=0.0))
        return await self.open(0, 0)

    async def open(self, base: int, depth: int) -> int:
        await self.trainer.refresh()
        entry = await asyncio.to_thread(
            self.trainer.log.append,
            lambda log: OpenEntry(
                number=log.next_number, prev=log.head_digest, write_id=f"open-{log.next_number}", at=time.time(), base=base,
                base_digest=log.digest(base), depth=depth, batch_cursor=0, checkpoint=None,
            ),
        )  # fmt: skip
        await self.control(ForkRecord(writer="", epoch=entry.number, base=base, depth=depth))
        return entry.number

    async def admit(self, group: int, *, version: int | None = None, samples: int = SIZE) -> None:
        for sample in range(samples):
            task = Task(
                run=self.settings.run.name,
                lane="train" if version is None else "eval",
                group=group,
                sample=sample,
                group_size=SIZE,
                prompt=pack_tokens([3, 1]),
                prompt_ref=PromptRef("numbers", 0, group),
                cursor=Cursor(0, group + 1),
                sampling=SamplingParams(max_tokens=4),
                seed=group * SIZE + sample,
                not_before_depth=0,
                exact_version=version,
                admitted_at=0.0,
                deadline=1e12,
            )
            self.tasks[group, sample] = (await self.control(TaskRecord(writer="", task=task)), task)

    async def sample(self, group: int, version: int, least_depth: int, *, only: tuple[int, ...] = (0, 1)) -> None:
        """Trajectories of the group by `version`, and their scores."""
        for sample in only:
            sequence, task = self.tasks[group, sample]
            data = encode_trajectory(trajectory_of(task, sequence, version))
            at = await self.bus.publish(self.bus.topology.trajectory(group, sample), data)
            row = BatchRow(group, sample, at, digest(data), 0.5, least_depth, 2)
            await self.score(row, version)
            self.rows[group, sample] = row

    async def score(self, row: BatchRow, version: int) -> None:
        score = Score(
            run=self.settings.run.name, lane=self.tasks[row.group, row.sample][1].lane, group=row.group, sample=row.sample,
            group_size=SIZE, task_sequence=self.tasks[row.group, row.sample][0], trajectory_sequence=row.sequence,
            trajectory_digest=row.digest, reward=row.reward, verifier="v", policy_tokens=2, total_tokens=4,
            version_spans=(VersionSpan(2, 4, version, "start"),), finish="stop",
        )  # fmt: skip
        await self.bus.publish(self.bus.topology.score(row.group, row.sample), encode(score))

    async def batch(self, epoch: int, depth: int, *groups: int, over_stale: OverStale | None = None, **change: Any) -> None:
        """A batch of whole groups; `change` alters the first row."""
        rows = [self.rows[group, sample] for group in groups for sample in range(SIZE) if (group, sample) in self.rows]
        if change:
            rows[0] = replace(rows[0], **change)
        record = BatchRecord(writer="", epoch=epoch, for_depth=depth, rows=tuple(rows), at=0.0, over_stale=over_stale or UNSET)
        self.sequences[epoch, depth] = await self.control(record)

    async def commit(self, epoch: int, base: int, depth: int, cursor: int | None = None) -> int:
        cursor = self.sequences[epoch, depth - 1] if cursor is None else cursor
        return await self.trainer._commit(epoch, base, depth, cursor)

    async def evaluate(self, version: int, depth: int, *groups: int, mean: float = 0.5) -> None:
        rows = tuple(
            EvalRow(row.group, row.sample, row.sequence, row.digest, row.reward)
            for group in groups
            for row in (self.rows[group, sample] for sample in range(SIZE))
        )
        await self.control(EvalRecord(writer="", version=version, depth=depth, wanted=len(rows), rows=rows, mean=mean))

    async def drop(self, group: int, reason: str = "deadline", samples: int = SIZE) -> None:
        await self.control(DropRecord(writer="", lane="train", group=group, samples=samples, reason=reason))

    async def step(self, epoch: int, base: int, depth: int, group: int) -> int:
        """One depth, as it should be: admit, sample by the head, batch, commit."""
        await self.admit(group)
        await self.sample(group, base, depth)
        await self.batch(epoch, depth, group)
        return await self.commit(epoch, base, depth + 1)

    async def end(self, depth: int) -> None:
        await self.control(EndRecord(writer="", reason="steps", depth=depth))

    async def audit(self) -> AuditReport:
        return await audit(self.bus, Log(self.objects, self.settings.run.name), self.settings)
