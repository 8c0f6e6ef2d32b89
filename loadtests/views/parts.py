"""What is watched: the real buffer, and scripted rollouts with reward and trainer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import numpy as np
from loadtests.views.part import Part

from towline import spans
from towline.buffer.service import BufferService
from towline.buffer.traces import Traces
from towline.bus.client import Delivery
from towline.bus.topology import CONTROL, REPLICAS
from towline.contract.codec import digest, encode
from towline.contract.control import BatchRecord, ReissueRecord, TaskRecord, decode_control
from towline.contract.entries import LogEntry, OpenEntry, VersionEntry
from towline.contract.outcome import Score
from towline.contract.policy import Committed, ReplicaInfo
from towline.contract.task import Task, VersionSpan
from towline.contract.trajectory import Segment, Timings, Trajectory, encode_trajectory
from towline.delta.state import ModelState, RawTensor, TensorSpec
from towline.runtime.service import _tell
from towline.store.keys import new_write_id
from towline.store.log import Log
from towline.store.versions import VersionFacts, write_version

POLICY_TOKENS = 512
REPLICAS_SHOWN = 16
AT_A_TIME = 64


class Buffer(Part):
    """The real service, without its lease and its port."""

    async def work(self) -> None:
        self._service = BufferService(self.settings, bus=self.bus, objects=self.objects, replica="0")
        self._service.health.ready()
        self._born = str((await self.bus.stream_state(CONTROL)).created_at)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._service.run())
            group.create_task(_tell(self._service, 0))
            group.create_task(self._count())

    async def _count(self) -> None:
        while True:
            state = self._service._leader.state
            self.counts = {"batched": float(sum(batch.samples for batch in state.batches.values()))}
            await asyncio.sleep(0.02)

    def turn(self, arm: str) -> None:
        super().turn(arm)
        tracer = spans.tracer
        self._service._leader._traces = None if tracer is None else Traces(tracer, self.run, self._born)


class Rollouts(Part):
    """Workers, reward and trainer in one: as many trajectories a second as `rate` says, if there are tasks for them."""

    rate = 1000.0

    async def work(self) -> None:
        self.log = Log(self.objects, self.run)
        await asyncio.to_thread(self.log.refresh)
        self._made = 0
        self.counts = {"published": 0.0}
        async with asyncio.TaskGroup() as group:
            group.create_task(self._register())
            group.create_task(self._train())
            group.create_task(self._serve())

    async def _register(self) -> None:
        while True:
            version = self.log.lineage.latest
            for index in range(REPLICAS_SHOWN):
                info = ReplicaInfo(replica=f"w{index}", host="bench", engine="scripted", slots=128, busy=100, state="serving",
                                   version=version, at=time.time())  # fmt: skip
                await self.bus.kv(REPLICAS).put(info.replica, encode(info))
            await asyncio.sleep(5.0)

    async def _serve(self) -> None:
        consumer = await self.bus.consumer(self.bus.topology.lane_consumer("train", 4096))
        await consumer.update(max_ack_pending=8192)
        due, running = time.monotonic(), set[asyncio.Task[None]]()
        while True:
            deliveries = await consumer.fetch(AT_A_TIME, 0.25)
            now = time.monotonic()
            due = max(due, now - 0.5)  # what was missed longer ago isn't made up for
            due += len(deliveries) / self.rate
            task = asyncio.create_task(self._finish(deliveries))
            running.add(task)
            task.add_done_callback(running.discard)
            if len(running) > 16:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if due > now:
                await asyncio.sleep(due - now)

    async def _finish(self, deliveries: list[Delivery]) -> None:
        made = await asyncio.gather(*(self._one(delivery) for delivery in deliveries))
        found = [one for one in made if one is not None]
        if found:
            headers = {place: span for place, (_, _, span) in enumerate(found) if span is not None}
            await self.bus.create_all([(subject, data) for subject, data, _ in found], headers=headers)
        for delivery in deliveries:
            await delivery.ack()
        self.counts["published"] += len(found)

    async def _one(self, delivery: Delivery) -> tuple[str, bytes, dict[str, str] | None] | None:
        """The trajectory published; the score to be, with the spans that worker and reward service make."""
        record = decode_control(delivery.data)
        assert isinstance(record, TaskRecord | ReissueRecord)
        task, topology = record.task, self.bus.topology
        with spans.follow("task", delivery.headers) as attempt:
            if attempt:
                attempt.set(group=task.group, sample=task.sample, delivery=delivery.num_delivered, replica="bench")
            with spans.child("rollout") as rollout:
                if rollout:
                    rollout.set(engine="scripted", tokens=POLICY_TOKENS)
                with spans.child("environment.reset"):
                    pass
                with spans.child("turn"):
                    with spans.child("engine.generate", "client") as generate:
                        data = encode_trajectory(trajectory_of(task, delivery.sequence, self.log.lineage.latest))
                        if generate:
                            generate.set(tokens=POLICY_TOKENS, finish="stop")
                    with spans.child("environment.step"):
                        pass
            with spans.child("trajectory", "producer", fixed=True) as published:
                created = await self.bus.create(topology.trajectory(task.group, task.sample), data, headers=published.headers)
        if not created.won:
            return None
        with spans.follow("reward", published.headers):
            with spans.child("verify"):
                score = score_of(task, delivery.sequence, created.sequence, data, self.log.lineage.latest)
            with spans.child("score", "producer", fixed=True) as scored:
                return topology.score(task.group, task.sample), encode(score), scored.headers

    async def _train(self) -> None:
        """An epoch, then a version for each batch."""
        opened = await self._append(lambda log, n, prev: OpenEntry(
            number=n, prev=prev, write_id=new_write_id(), at=time.time(), base=0, base_digest=log.digest(0), depth=0,
            batch_cursor=0, checkpoint=None))  # fmt: skip
        head, depth = 0, 0
        async with contextlib.aclosing(self.bus.read(CONTROL, subjects=[self.bus.topology.control("batch")])) as messages:
            async for message in messages:
                record = decode_control(message.data)
                if isinstance(record, BatchRecord) and (record.epoch, record.for_depth) == (opened.number, depth):
                    with spans.follow("train.step", message.headers):
                        head, depth = await self._commit(opened.number, head, depth, message.sequence), depth + 1

    async def _commit(self, epoch: int, base: int, depth: int, cursor: int) -> int:
        write_id = new_write_id()
        manifest = await asyncio.to_thread(
            write_version, self.objects, self.run, epoch=epoch, base=base, write_id=write_id, base_state=state_at(depth),
            new_state=state_at(depth + 1), facts=VersionFacts(depth=depth + 1, step=depth + 1, batch_cursor=cursor),
        )  # fmt: skip
        entry = await self._append(lambda log, n, prev: VersionEntry(
            number=n, prev=prev, write_id=write_id, at=time.time(), epoch=epoch, base=base, base_digest=log.digest(base),
            depth=depth + 1, skipped=(), representation="delta", codec=manifest.codec, folder=manifest.folder,
            manifest_digest=manifest.digest, layout_digest=manifest.layout_digest, model_digest=manifest.model_digest,
            density=manifest.density, wire_bytes=manifest.wire_bytes, model_bytes=manifest.model_bytes, step=depth + 1,
            batch_cursor=cursor, checkpoint=None, probe=None, encode_seconds=0.0, upload_seconds=0.0,
            verify_seconds=0.0))  # fmt: skip
        await self.bus.publish(
            self.bus.topology.policy("committed"), encode(Committed(number=entry.number, epoch=epoch, write_id=write_id))
        )
        return entry.number

    async def _append(self, make: Callable[[Log, int, str | None], LogEntry]) -> LogEntry:
        return await asyncio.to_thread(self.log.append, lambda log: make(log, log.next_number, log.head_digest))


def state_at(depth: int) -> ModelState:
    return {"w": RawTensor(TensorSpec("w", "F32", (1,)), np.array([depth], "<f4").view(np.uint8))}


_TOKENS = np.arange(POLICY_TOKENS, dtype=np.int32)
_LOGPROBS = np.linspace(-3.0, -0.001, POLICY_TOKENS, dtype=np.float32)


def trajectory_of(task: Task, task_sequence: int, version: int) -> Trajectory:
    prompt = task.prompt_tokens
    start, end = prompt.size, prompt.size + POLICY_TOKENS
    return Trajectory(
        run=task.run, lane=task.lane, group=task.group, sample=task.sample, group_size=task.group_size,
        task_sequence=task_sequence, attempt=task.attempt, prompt_ref=task.prompt_ref, reference=task.reference,
        tokens=np.r_[prompt, _TOKENS + task.seed % 1000].astype(np.int32),
        loss_mask=np.r_[np.zeros(start, np.uint8), np.ones(POLICY_TOKENS, np.uint8)],
        logprobs=np.r_[np.full(start, np.nan, np.float32), _LOGPROBS],
        version_spans=(VersionSpan(start, end, version, "start"),),
        segments=(Segment(0, start, "prompt"), Segment(start, end, "policy")),
        finish="stop", sampling=task.sampling, seed=task.seed, engine="scripted", replica="bench",
        timings=Timings(pulled_at=time.time(), finished_at=time.time()),
    )  # fmt: skip


def score_of(task: Task, task_sequence: int, sequence: int, data: bytes, version: int) -> Score:
    start = task.prompt_tokens.size
    return Score(
        run=task.run, lane=task.lane, group=task.group, sample=task.sample, group_size=task.group_size,
        task_sequence=task_sequence, trajectory_sequence=sequence,
        trajectory_digest=digest(data), reward=float(task.seed % 5) / 4, verifier="scripted",
        policy_tokens=POLICY_TOKENS, total_tokens=start + POLICY_TOKENS, finish="stop",
        version_spans=(VersionSpan(start, start + POLICY_TOKENS, version, "start"),),
    )  # fmt: skip
