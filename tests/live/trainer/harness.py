"""A scripted buffer and a scripted publisher around a real trainer, on a real bus and a real store.

The buffer's rows for a depth are the same in every epoch but for the version that sampled them, so that however often the
trainer is killed, the run must end with the weights of an undisturbed one.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from towline.bus.client import Bus
from towline.bus.control_log import ControlLog
from towline.bus.topology import CONTROL, POLICY
from towline.config import BusSettings, Settings, StoreSettings
from towline.contract.codec import digest, encode
from towline.contract.control import BatchRecord, BatchRow, EndRecord, ForkRecord, decode_control
from towline.contract.entries import LogEntry, OpenEntry, VersionEntry
from towline.contract.policy import Committed, Refused, Staged, decode_policy
from towline.contract.task import PromptRef, SamplingParams, VersionSpan
from towline.contract.trajectory import Segment, Timings, Trajectory, encode_trajectory
from towline.delta.state import ModelState, model_digest, tensor_digests
from towline.learner.advantages.group_normalised import group_normalised
from towline.learner.base import Row, pack_rows
from towline.learner.export import convert_folder
from towline.learner.torch_backend import TorchLearner
from towline.store.commit import version_entry
from towline.store.log import Log
from towline.store.objects import ObjectStore, open_store
from towline.store.versions import materialize, read_manifest
from towline.trainer.figures import Figures
from towline.trainer.run import run_trainer
from towline.trainer.watch import cancel

GROUPS, GROUP_SIZE, VOCABULARY = 2, 4, 17


def settings_for(name: str, model_folder: Path, store: StoreSettings, bus: BusSettings, **sections: Any) -> Settings:
    tree: dict[str, Any] = {
        "run": {"name": name, "steps": 4},
        "bus": bus,
        "store": store,
        "model": {"source": str(model_folder)},
        "prompts": {"source": "nowhere:prompts"},
        "sampling": {"max_tokens": 8},
        "reward": {"function": "nowhere:reward"},
        "buffer": {"group_size": GROUP_SIZE, "groups_per_batch": GROUPS},
        "trainer": {"learning_rate": 1e-2, "minibatches": 2, "checkpoint_every": 2, "warmup_steps": 2},
    }
    for key, section in sections.items():
        tree[key] = {**tree[key], **section} if isinstance(tree.get(key), dict) else section
    return Settings.model_validate(tree)


@dataclass(frozen=True)
class Made:
    """A row's content, by depth, group and sample."""

    tokens: np.ndarray[Any, np.dtype[np.int32]]
    mask: np.ndarray[Any, np.dtype[np.uint8]]
    logprobs: np.ndarray[Any, np.dtype[np.float32]]
    reward: float


def make_rows(depth: int) -> list[Made]:
    random = np.random.default_rng(1000 + depth)
    made = []
    for number in range(GROUPS * GROUP_SIZE):
        prompt, response = 2 + number % 3, int(random.integers(2, 6))
        mask = np.r_[np.zeros(prompt, np.uint8), np.ones(response, np.uint8)]
        made.append(
            Made(
                tokens=random.integers(0, VOCABULARY, mask.size).astype(np.int32),
                mask=mask,
                logprobs=np.where(mask == 1, -random.exponential(2.0, mask.size), np.nan).astype(np.float32),
                reward=float(random.random()),
            )
        )
    return made


def learner_rows(depth: int, leave_out: tuple[int, ...] = ()) -> list[Row]:
    """What the learner should be given for the depth, put together without the trainer's help."""
    made = make_rows(depth)
    rows = []
    for number, row in enumerate(made):
        group = number // GROUP_SIZE
        rewards = np.array([other.reward for other in made[group * GROUP_SIZE : (group + 1) * GROUP_SIZE]])
        if number not in leave_out:
            rows.append(
                Row(
                    group=group,
                    sample=number % GROUP_SIZE,
                    tokens=row.tokens,
                    loss_mask=row.mask,
                    logprobs=row.logprobs,
                    versions=np.zeros(row.mask.size, np.int32),
                    temperature=1.0,
                    advantage=float(group_normalised(rewards)[number % GROUP_SIZE]),
                    staleness=0,
                )
            )
    return rows


def expected_digest(
    settings: Settings, model: Path, scratch: Path, depth: int, leave_out: dict[int, tuple[int, ...]] | None = None
) -> str:
    """The model digest after `depth` batches, by a learner that is driven directly."""
    return model_digest(tensor_digests(expected_state(settings, model, scratch, depth, leave_out)))


def expected_state(
    settings: Settings, model: Path, scratch: Path, depth: int, leave_out: dict[int, tuple[int, ...]] | None = None
) -> ModelState:
    """The weights after `depth` batches, by a torch learner alone."""
    alone = settings.trainer.model_copy(update={"backend": "torch", "dp": 1, "tp": 1, "pp": 1})
    settings = settings.model_copy(update={"trainer": alone})
    folder = scratch / "expected"
    shutil.rmtree(folder, ignore_errors=True)
    convert_folder(model, folder, settings.model.publish_dtype)
    learner = TorchLearner(folder, settings, settings.run.seed)
    for step in range(depth):
        learner.train(pack_rows(step, learner_rows(step, (leave_out or {}).get(step, ()))))
    return learner.state()


@dataclass
class FakeBuffer:
    """Follows the LOG: a fork for each `open`, then a batch for each depth as soon as the staleness bound allows it."""

    bus: Bus
    log: Log
    settings: Settings
    tamper: Callable[[int, int, BatchRow], BatchRow] = lambda depth, number, row: row
    """(depth, row number, row) -> the row as it is recorded."""
    garbage: set[tuple[int, int]] = field(default_factory=set)
    """(depth, row number) whose trajectory isn't one."""
    version_for: Callable[[int], int] | None = None
    """Depth -> the version that the rows name; by default the newest."""
    last_depth: int | None = None
    """Batches stop there, and the run ends for want of data."""
    hold_at: int | None = None
    """No batch for that depth or above while it's set."""
    batches: list[BatchRecord] = field(default_factory=list)
    _group: int = 0

    async def run(self) -> None:
        pen = ControlLog(self.bus, "scripted")
        last_end = -1
        async with contextlib.aclosing(self.bus.read(CONTROL, follow=False)) as messages:
            async for message in messages:
                pen.last_sequence = message.sequence
                record = decode_control(message.data)
                if isinstance(record, EndRecord):
                    last_end = record.depth
                elif isinstance(record, BatchRecord):
                    self._group = max([self._group, *(row.group + 1 for row in record.rows)])
        await pen.take_over()
        topology = self.bus.topology
        epoch, next_depth = -1, 0
        while True:
            await asyncio.to_thread(self.log.refresh)
            lineage = self.log.lineage
            newest = lineage.newest_epoch
            if newest is not None and newest != epoch:
                opened = self.log.entry(newest)
                assert isinstance(opened, OpenEntry)
                epoch, next_depth = newest, opened.depth
                fork = ForkRecord(writer=pen.stamp(), epoch=epoch, base=opened.base, depth=opened.depth)
                await pen.append([(topology.control("fork"), encode(fork))])
            if epoch >= 0:
                depth = lineage.depth(lineage.latest)
                limit = min(self.settings.run.steps, depth + 1 + self.settings.buffer.max_staleness)
                limit = min([limit, *(bound for bound in (self.last_depth, self.hold_at) if bound is not None)])
                while next_depth < limit:
                    record = await self._batch(pen, epoch, next_depth)
                    await pen.append([(topology.control("batch"), encode(record))])
                    self.batches.append(record)
                    next_depth += 1
                wanted = self.settings.run.steps if self.last_depth is None else self.last_depth
                if depth >= wanted > last_end:
                    reason = "steps" if self.last_depth is None else "end_of_data"
                    await pen.append(
                        [(topology.control("end"), encode(EndRecord(writer=pen.stamp(), reason=reason, depth=depth)))]
                    )
                    last_end = depth
            await asyncio.sleep(0.01)

    async def _batch(self, pen: ControlLog, epoch: int, depth: int) -> BatchRecord:
        lineage = self.log.lineage
        version = self.version_for(depth) if self.version_for else lineage.latest
        rows = []
        for number, made in enumerate(make_rows(depth)):
            group, sample = self._group + number // GROUP_SIZE, number % GROUP_SIZE
            data = encode_trajectory(self._trajectory(made, group, sample, version))
            if (depth, number) in self.garbage:
                data = b"not a trajectory"
            created = await self.bus.create(self.bus.topology.trajectory(group, sample), data)
            assert created.won
            row = BatchRow(
                group, sample, created.sequence, digest(data), made.reward, lineage.depth(version), int(made.mask.sum())
            )
            rows.append(self.tamper(depth, number, row))
        self._group += GROUPS
        return BatchRecord(writer=pen.stamp(), epoch=epoch, for_depth=depth, rows=tuple(rows), at=time.time())

    def _trajectory(self, made: Made, group: int, sample: int, version: int) -> Trajectory:
        size = int(made.mask.size)
        prompt = size - int(made.mask.sum())
        return Trajectory(
            run=self.bus.topology.run, lane="train", group=group, sample=sample, group_size=GROUP_SIZE, task_sequence=1,
            attempt=0, prompt_ref=PromptRef("scripted", 0, group), reference={}, tokens=made.tokens, loss_mask=made.mask,
            logprobs=made.logprobs, version_spans=(VersionSpan(prompt, size, version, "start"),),
            segments=(Segment(0, prompt, "prompt"), Segment(prompt, size, "policy")), finish="stop",
            sampling=SamplingParams(max_tokens=8), seed=1, engine="scripted", replica="r",
            timings=Timings(pulled_at=0.0, finished_at=1.0),
        )  # fmt: skip


@dataclass
class FakePublisher:
    """Commits what the trainer stages by the protocol's rules: applied to its own copy, every digest compared."""

    bus: Bus
    objects: ObjectStore
    log: Log
    delay_seconds: float = 0.0
    deaf_to: int = 0
    """So many `staged` messages are overlooked."""
    refuse: int = 0
    """So many are refused."""
    seen: list[Staged] = field(default_factory=list)
    states: dict[int, ModelState] = field(default_factory=dict)
    """Version -> its weights."""

    async def run(self) -> None:
        topology = self.bus.topology
        async for message in self.bus.read(POLICY, subjects=[topology.policy("staged")]):
            staged = decode_policy(message.data)
            assert isinstance(staged, Staged)
            self.seen.append(staged)
            await asyncio.to_thread(self.log.refresh)
            if self.log.find(staged.write_id) is not None:
                continue
            if self.deaf_to:
                self.deaf_to -= 1
                continue
            await asyncio.sleep(self.delay_seconds)
            lineage = self.log.lineage
            reason = None
            if self.refuse:
                self.refuse -= 1
                reason = "scripted"
            elif staged.epoch != lineage.newest_epoch or staged.base != lineage.epoch_head(staged.epoch):
                reason = "not the epoch's head"
            elif lineage.quarantined(staged.base):
                reason = "the base is quarantined"
            if reason is not None:
                refused = Refused(epoch=staged.epoch, write_id=staged.write_id, reason=reason)
                await self.bus.publish(topology.policy("refused"), encode(refused))
                continue
            try:
                entry = await asyncio.to_thread(self._commit, staged)
            except _OvertakenError:
                continue
            await self.bus.publish(
                topology.policy("committed"), encode(Committed(number=entry.number, epoch=staged.epoch, write_id=staged.write_id))
            )

    def _commit(self, staged: Staged) -> LogEntry:
        manifest = read_manifest(self.objects, staged.folder, staged.manifest_digest)

        def build(log: Log) -> LogEntry:
            if log.lineage.newest_epoch != staged.epoch or log.lineage.quarantined(staged.base):
                raise _OvertakenError
            return version_entry(log, manifest, staged.manifest_digest, 0.0)

        entry = self.log.append(build)
        self.states[entry.number] = materialize(self.objects, self.log, entry.number, None)
        return entry


class _OvertakenError(Exception):
    """A newer epoch is open, or the base is quarantined."""


@dataclass
class Stage:
    """What a test plays on."""

    settings: Settings
    bus: Bus
    objects: ObjectStore
    log: Log
    buffer: FakeBuffer
    publisher: FakePublisher
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    figures: Figures = field(default_factory=Figures)
    told: list[str | None] = field(default_factory=list)

    async def train(self, seconds: float = 60.0, settings: Settings | None = None) -> None:
        """A trainer in this process, from its start to its end."""
        async with asyncio.timeout(seconds):
            await run_trainer(
                settings or self.settings, self.bus, self.objects, replica=self.settings.run.name, figures=self.figures,
                draining=self.draining, tell=self.told.append,
            )  # fmt: skip

    def versions(self) -> list[VersionEntry]:
        """Those on the line, entry 0 left out."""
        self.log.refresh()
        return [entry for number in self.log.lineage.path() if isinstance(entry := self.log.entry(number), VersionEntry)]


@contextlib.asynccontextmanager
async def on_stage(settings: Settings, *, publisher: bool = True) -> AsyncIterator[Stage]:
    """A bus, a store, and the scripted services at work; whatever one of them raises fails the test."""
    bus = await Bus.connect(settings.bus, run=settings.run.name, client_name="scripted")
    objects = open_store(settings.store)
    log = Log(objects, settings.run.name)
    stage = Stage(
        settings, bus, objects, log, FakeBuffer(bus, log, settings), FakePublisher(bus, objects, Log(objects, settings.run.name))
    )
    await bus.ensure()
    tasks = [asyncio.create_task(stage.buffer.run())]
    if publisher:
        tasks.append(asyncio.create_task(stage.publisher.run()))
    try:
        yield stage
        for task in tasks:
            if task.done():
                task.result()
    finally:
        failures = [task.exception() for task in tasks if task.done()]
        await cancel(*tasks)
        await bus.close()
    for failure in failures:
        if failure is not None:
            raise failure
