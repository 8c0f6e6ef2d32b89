"""A scripted fleet, reward service, trainer and publisher around a real buffer, on a real bus and a real store.

They follow the protocol's order of writes, serve whatever version is the newest, and fail now and then in a way that the task
alone decides. Weights play no part: a version is its LOG entry.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from towline.buffer.leader import Leader
from towline.bus.client import Bus, Consumer, Delivery
from towline.bus.topology import CONTROL, REPLICAS
from towline.config import BusSettings, Settings, StoreSettings
from towline.contract.codec import digest, encode
from towline.contract.control import BatchRecord, Record, ReissueRecord, TaskRecord, decode_control
from towline.contract.entries import LogEntry, OpenEntry, VersionEntry
from towline.contract.outcome import Failure, Score
from towline.contract.policy import Committed, ReplicaInfo
from towline.contract.task import PromptRef, Task, VersionSpan
from towline.contract.trajectory import Segment, Timings, Trajectory, encode_trajectory
from towline.delta.state import RawTensor, TensorSpec
from towline.environment.prompts import Shuffled
from towline.store.base import seed_base_state
from towline.store.blobs import Blobs
from towline.store.lineage import is_eval_version
from towline.store.log import Log
from towline.store.objects import ObjectStore, open_store

SLOTS = 6


def prompts(tokenizer: Any, *, seed: int, length: int = 7) -> Shuffled:
    """Named by the settings of these tests."""
    return Shuffled("numbers", length, lambda index: ([index + 3, 1], {"answer": index}), seed=seed)


def settings_for(name: str, bus: BusSettings, store: StoreSettings, **sections: dict[str, Any]) -> Settings:
    tree: dict[str, Any] = {
        "run": {"name": name, "steps": 4},
        "bus": bus,
        "store": store,
        "model": {"source": "scripted"},
        "prompts": {"source": "live.buffer.harness:prompts"},
        "sampling": {"max_tokens": 4},
        "reward": {"function": "nowhere:reward"},
        "buffer": {"group_size": 2, "groups_per_batch": 2, "max_staleness": 1, "max_attempts": 3},
        "eval": {"every": 2, "prompts": 3},
    }
    for key, section in sections.items():
        tree[key] = {**tree.get(key, {}), **section}
    return Settings.model_validate(tree)


async def seed(objects: ObjectStore, run: str) -> Log:
    """Entry 0: a model of four bytes."""
    state = {"w": RawTensor(TensorSpec("w", "F32", (1,)), np.zeros(4, np.uint8))}
    log = Log(objects, run)
    await asyncio.to_thread(seed_base_state, objects, log, state, {"config.json": b'{"eos_token_id": [2, 4]}'}, "m", None, None)
    return log


class Part:
    """One scripted part, with a view of the LOG of its own."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: Settings) -> None:
        self.bus, self.settings, self.run = bus, settings, settings.run.name
        self.log = Log(objects, self.run)

    async def refresh(self) -> None:
        await asyncio.to_thread(self.log.refresh)


class Fleet(Part):
    """Workers and reward in one: pulls both lanes, samples by the newest version that fits, publishes and scores."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: Settings, *, fail_every: int = 0) -> None:
        super().__init__(bus, objects, settings)
        self.fail_every = fail_every
        self.served = 0
        self.failed: set[tuple[int, int]] = set()
        self.tasks: list[Task] = []

    async def work(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._register())
            group.create_task(self._serve_lane("train", None))
            group.create_task(self._serve_evals(group))

    async def _register(self) -> None:
        while True:
            latest = self.log.lineage.latest if self.log.next_number else None
            info = ReplicaInfo(replica="w0", host="h", engine="scripted", slots=SLOTS, busy=0, state="serving", version=latest,
                               at=time.time())  # fmt: skip
            await self.bus.kv(REPLICAS).put("w0", encode(info))
            await asyncio.sleep(0.5)

    async def _serve_evals(self, group: asyncio.TaskGroup) -> None:
        seen: set[int] = set()
        every, steps = self.settings.eval.every, self.settings.run.steps
        while True:
            await self.refresh()
            for version in self.log.lineage.path():
                if version not in seen and is_eval_version(self.log.lineage, version, every, steps):
                    seen.add(version)
                    group.create_task(self._serve_lane("eval", version))
            await asyncio.sleep(0.05)

    async def _serve_lane(self, lane: str, version: int | None) -> None:
        consumer: Consumer = await self.bus.consumer(self.bus.topology.lane_consumer(lane, SLOTS, version))
        while True:
            for delivery in await consumer.fetch(SLOTS, 5.0):
                await self._serve(delivery)

    async def _serve(self, delivery: Delivery) -> None:
        record = decode_control(delivery.data)
        assert isinstance(record, TaskRecord | ReissueRecord)
        task = record.task
        self.tasks.append(task)
        number = task.group * task.group_size + task.sample
        if self.fail_every and number % self.fail_every == 0 and task.attempt == 0 and task.lane == "train":
            self.failed.add((task.group, task.sample))
            failure = Failure(run=self.run, lane=task.lane, group=task.group, sample=task.sample, task_sequence=delivery.sequence,
                              delivery=delivery.num_delivered, stage="generate", reason="scripted", replica="w0")  # fmt: skip
            await self.bus.publish(self.bus.topology.failure(task.group, task.sample), encode(failure))
        else:
            version = await self._version_for(task)
            await self.publish(task, delivery.sequence, version)
        await delivery.ack()

    async def _version_for(self, task: Task) -> int:
        if task.exact_version is not None:
            return task.exact_version
        while self.log.lineage.depth(self.log.lineage.latest) < task.not_before_depth:
            await self.refresh()
            await asyncio.sleep(0.01)
        return self.log.lineage.latest

    async def publish(self, task: Task, task_sequence: int, version: int, *, reward: float | None = None) -> None:
        """The trajectory, create-only, then its score."""
        data = encode_trajectory(trajectory_of(task, task_sequence, version))
        topology = self.bus.topology
        created = await self.bus.create(topology.trajectory(task.group, task.sample), data)
        if not created.won:
            return
        self.served += 1
        score = Score(
            run=self.run, lane=task.lane, group=task.group, sample=task.sample, group_size=task.group_size,
            task_sequence=task_sequence, trajectory_sequence=created.sequence, trajectory_digest=digest(data),
            reward=float(task.seed % 5) / 4 if reward is None else reward, verifier="scripted", policy_tokens=2, total_tokens=4,
            version_spans=(VersionSpan(2, 4, version, "start"),), finish="stop",
        )  # fmt: skip
        await self.score(task, encode(score))

    async def score(self, task: Task, data: bytes) -> None:
        await self.bus.create(self.bus.topology.score(task.group, task.sample), data)


def trajectory_of(task: Task, task_sequence: int, version: int) -> Trajectory:
    prompt = task.prompt_tokens
    nan = np.nan
    return Trajectory(
        run=task.run, lane=task.lane, group=task.group, sample=task.sample, group_size=task.group_size,
        task_sequence=task_sequence, attempt=task.attempt, prompt_ref=PromptRef(*_ref(task)), reference=task.reference,
        tokens=np.r_[prompt, np.array([task.seed % 11, 2])].astype(np.int32),
        loss_mask=np.array([0] * prompt.size + [1, 1], np.uint8),
        logprobs=np.array([nan] * prompt.size + [-0.5, -0.25], np.float32),
        version_spans=(VersionSpan(2, 4, version, "start"),), segments=(Segment(0, 2, "prompt"), Segment(2, 4, "policy")),
        finish="stop", sampling=task.sampling, seed=task.seed, engine="scripted", replica="w0",
        timings=Timings(pulled_at=time.time(), finished_at=time.time()),
    )  # fmt: skip


def _ref(task: Task) -> tuple[str, int, int]:
    return task.prompt_ref.source, task.prompt_ref.epoch, task.prompt_ref.index


class Trainer(Part):
    """Trainer and publisher in one: consumes its epoch's batches and commits a version for each."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: Settings) -> None:
        super().__init__(bus, objects, settings)
        self.batches: list[BatchRecord] = []

    async def train(self, *, until_depth: int, base_depth: int | None = None) -> None:
        """Open an epoch, on the head or on the line's version of `base_depth`, and go on to `until_depth`."""
        await self.refresh()
        line = self.log.lineage
        base = line.latest if base_depth is None else line.version_at_depth(base_depth)
        assert base is not None
        epoch = (await self._append(lambda log, n, prev: OpenEntry(
            number=n, prev=prev, write_id=f"open-{n}", at=time.time(), base=base, base_digest=log.digest(base),
            depth=log.lineage.depth(base), batch_cursor=0, checkpoint=None))).number  # fmt: skip
        depth, head = line.depth(base), base
        if depth >= until_depth:
            return
        async with contextlib.aclosing(self.bus.read(CONTROL, subjects=[self.bus.topology.control("batch")])) as messages:
            async for message in messages:
                record = decode_control(message.data)
                assert isinstance(record, BatchRecord)
                if (record.epoch, record.for_depth) != (epoch, depth):
                    continue
                self.batches.append(record)
                await asyncio.sleep(0.02)
                head = await self._commit(epoch, head, depth + 1, message.sequence)
                depth += 1
                if depth >= until_depth:
                    return

    async def _commit(self, epoch: int, base: int, depth: int, cursor: int) -> int:
        entry = await self._append(lambda log, n, prev: VersionEntry(
            number=n, prev=prev, write_id=f"version-{n}", at=time.time(), epoch=epoch, base=base, base_digest=log.digest(base),
            depth=depth, skipped=(), representation="delta", codec="none", folder="f", manifest_digest="m", layout_digest="l",
            model_digest="m", density=0.0, wire_bytes=0, model_bytes=4, step=depth, batch_cursor=cursor, checkpoint=None,
            probe=None, encode_seconds=0.0, upload_seconds=0.0, verify_seconds=0.0))  # fmt: skip
        hint = Committed(number=entry.number, epoch=epoch, write_id=entry.write_id)
        await self.bus.publish(self.bus.topology.policy("committed"), encode(hint))
        return entry.number

    async def _append(self, make: Any) -> LogEntry:
        return await asyncio.to_thread(self.log.append, lambda log: make(log, log.next_number, log.head_digest))


@contextlib.asynccontextmanager
async def connected(settings: Settings, name: str = "test") -> AsyncIterator[tuple[Bus, ObjectStore]]:
    objects = open_store(settings.store)
    run = settings.run.name
    bus = await Bus.connect(settings.bus, run=run, client_name=f"{run}.{name}", blobs=Blobs(objects, run))
    try:
        await bus.ensure()
        yield bus, objects
    finally:
        await bus.close()


@contextlib.asynccontextmanager
async def leading(settings: Settings, bus: Bus, objects: ObjectStore) -> AsyncIterator[Leader]:
    """A buffer in this process, without the lease; its error, if it has one, is raised at the end."""
    leader, draining = Leader(settings, bus, objects, lambda state: None), asyncio.Event()
    running = asyncio.create_task(leader.lead(draining))
    try:
        yield leader
        draining.set()
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def working(part: Fleet) -> AsyncIterator[Fleet]:
    task = asyncio.create_task(part.work())
    try:
        yield part
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def records(bus: Bus) -> list[Record]:
    return [decode_control(message.data) async for message in bus.read(CONTROL, follow=False)]
