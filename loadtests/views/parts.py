"""The benchmark's processes: the buffer, scripted rollouts with reward and trainer, and the views. Orders come by standard input.

`plain`, `screens`, `readers` and `traced` name the arm that begins; `count` is answered with a line of JSON: this process's
counts so far.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import uvloop
from rich.console import Console
from rich.live import Live

from towline import spans
from towline.buffer.service import BufferService
from towline.buffer.traces import Traces
from towline.bundle.source import BusSource
from towline.bus.client import Bus, Delivery
from towline.bus.topology import CONTROL, REPLICAS
from towline.config import Settings, load_settings
from towline.contract.codec import digest, encode
from towline.contract.control import BatchRecord, ReissueRecord, TaskRecord, decode_control
from towline.contract.entries import LogEntry, OpenEntry, VersionEntry
from towline.contract.outcome import Score
from towline.contract.policy import Committed, ReplicaInfo
from towline.contract.task import Task, VersionSpan
from towline.contract.trajectory import Segment, Timings, Trajectory, encode_trajectory
from towline.delta.state import ModelState, RawTensor, TensorSpec
from towline.errors import TowlineError
from towline.local.live import View
from towline.local.top import Screen, read_look
from towline.report.figures import FigureBook
from towline.report.progress import progress_of
from towline.runtime.service import _tell
from towline.runtime.tracing import Tracing, begin
from towline.spans import Tracer
from towline.store.blobs import Blobs
from towline.store.keys import new_write_id
from towline.store.log import Log
from towline.store.objects import ObjectStore, open_store
from towline.store.versions import VersionFacts, write_version
from towline.trace.gather import trace

POLICY_TOKENS = 512
REPLICAS_SHOWN = 16
AT_A_TIME = 64
LOOK_SECONDS = 1.0
"""Between two looks of `towline top`, and of `towline up`'s own view."""


class Part:
    """A process's bus, store and orders."""

    def __init__(self, settings: Settings, bus: Bus, objects: ObjectStore, endpoint: str) -> None:
        self.settings, self.bus, self.objects = settings, bus, objects
        self.run = settings.run.name
        self.arm = "plain"
        self.counts: dict[str, float] = {}
        found = begin(settings.telemetry.model_copy(update={"endpoint": endpoint}), service="bench", replica="0", run=self.run)
        assert found is not None
        self._tracing: Tracing = found
        self.tracer: Tracer | None = spans.tracer
        spans.install(None)

    def turn(self, arm: str) -> None:
        self.arm = arm
        spans.install(self.tracer if arm == "traced" else None)

    async def work(self) -> None:
        raise NotImplementedError

    async def obey(self) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := (await reader.readline()).decode().strip():
            if line == "count":
                used = resource.getrusage(resource.RUSAGE_SELF)
                print(json.dumps(self.counts | {"cpu_seconds": used.ru_utime + used.ru_stime}), flush=True)
            else:
                self.turn(line)


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


class Views(Part):
    """Works while its arm runs; what it is at when the arm ends is broken off."""

    arm_of: ClassVar[str]

    async def work(self) -> None:
        self._on = asyncio.Event()
        self._at_work: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            for view in self.views():
                group.create_task(self._while_on(view))

    def views(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        raise NotImplementedError

    def turn(self, arm: str) -> None:
        self.arm = arm
        if arm == self.arm_of:
            self._on.set()
        else:
            self._on.clear()
            for task in self._at_work:
                task.cancel()

    async def _while_on(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await self._on.wait()
            task = asyncio.create_task(work())
            self._at_work.add(task)
            await asyncio.wait([task])
            self._at_work.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                if not isinstance(error, TowlineError):
                    raise error
                print(f"view: {error.message}", file=sys.stderr, flush=True)
                await asyncio.sleep(0.5)


class Screens(Views):
    """`towline top` and `towline up`'s live view, on screens that nobody sees."""

    arm_of = "screens"

    def views(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        self.counts = {"frames": 0.0}
        return self._top, self._live

    async def _top(self) -> None:
        screen = Screen(self.run, self.settings.run.steps, self.settings.buffer.max_staleness, FigureBook())
        with Live(console=_console(), refresh_per_second=4, screen=True) as live:
            while self._on.is_set():
                live.update(screen.draw(await read_look(self.bus)))
                self.counts["frames"] += 1
                await asyncio.sleep(LOOK_SECONDS)

    async def _live(self) -> None:
        book = FigureBook()
        with View(_console(), f"towline {self.run}", {"buffer": 1}) as view:
            while self._on.is_set():
                book.update((await read_look(self.bus)).statuses)
                view.show(
                    progress_of(book, steps=self.settings.run.steps, max_staleness=self.settings.buffer.max_staleness), book
                )
                await asyncio.sleep(LOOK_SECONDS)


class Readers(Views):
    """Somebody who looks at one sample after the other (`towline trace`)."""

    arm_of = "readers"
    trace_seconds = 10.0

    def views(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        self.counts = {"traces": 0.0, "trace_seconds": 0.0}
        return (self._traces,)

    async def _traces(self) -> None:
        while self._on.is_set():
            began = time.monotonic()
            message = await self.bus.last(CONTROL, self.bus.topology.control("batch"))
            if message is not None and isinstance(record := decode_control(message.data), BatchRecord):
                row = random.choice(record.rows)
                source = await BusSource.open(self.bus, self.objects, self.settings)
                life = await trace(source, row.group, row.sample)
                assert life.batches, life.explanation
                self.counts["traces"] += 1
                self.counts["trace_seconds"] += time.monotonic() - began
            await asyncio.sleep(max(self.trace_seconds - (time.monotonic() - began), 0.1))


def _console() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=160, height=60)


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


PARTS: Mapping[str, type[Part]] = {"buffer": Buffer, "rollouts": Rollouts, "screens": Screens, "readers": Readers}


async def run_part(name: str, config: Path, endpoint: str) -> None:
    settings = load_settings(config)
    objects = open_store(settings.store)
    run = settings.run.name
    bus = await Bus.connect(settings.bus, run=run, client_name=f"bench-{name}", blobs=Blobs(objects, run))
    part = PARTS[name](settings, bus, objects, endpoint)
    work = asyncio.create_task(part.work())
    obey = asyncio.create_task(part.obey())
    done, left = await asyncio.wait([work, obey], return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    for task in done:
        task.result()
    await bus.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("config", type=Path)
    parser.add_argument("endpoint")
    parser.add_argument("--rate", type=float, default=Rollouts.rate)
    parser.add_argument("--trace-seconds", type=float, default=Readers.trace_seconds)
    given = parser.parse_args()
    Rollouts.rate, Readers.trace_seconds = given.rate, given.trace_seconds
    uvloop.run(run_part(given.part, given.config, given.endpoint))
