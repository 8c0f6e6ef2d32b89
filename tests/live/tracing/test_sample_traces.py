"""A run's samples as traces: a real buffer, worker and reward service on a real bus, exporting to a real OTLP receiver."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from live.buffer.harness import connected, leading, seed, settings_for
from live.worker.fleet import RealVersions
from support.otlp import Collector, SpanSeen, collecting
from support.waiting import until
from towline import spans
from towline.bus.client import Bus
from towline.bus.topology import CONTROL, OUTCOME, TRAJECTORY
from towline.config import BusSettings, RewardSettings, Settings, StoreSettings, TelemetrySettings
from towline.contract.control import TaskRecord, decode_control
from towline.engine.choice import make_engine
from towline.reward.scoring import Scorer
from towline.rollout_worker.worker import Worker
from towline.runtime.tracing import begin
from towline.store.objects import ObjectStore
from towline.verifiers.base import Reward, Verifier
from towline.verifiers.tokenizer import LazyTokenizer

STEPS = 3


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def settings_of(name: str, bus: BusSettings, store: StoreSettings, **rollout: Any) -> Settings:
    return settings_for(
        name, bus, store, run={"steps": STEPS}, sampling={"max_tokens": 12}, eval={"every": 0},
        buffer={"group_size": 2, "groups_per_batch": 4, "max_staleness": 1},
        rollout={"engine": "synthetic", "slots": 8, "poll_seconds": 0.1, "ack_wait_seconds": 5.0, **rollout},
    )  # fmt: skip


@contextlib.asynccontextmanager
async def worker(
    name: str, settings: Settings, bus: Bus, objects: ObjectStore, folder: Path, **engine: Any
) -> AsyncIterator[Worker]:
    arguments = {"vocabulary": 100, "mean_tokens": 8.0, **engine}
    rollout = settings.rollout.model_copy(update={"arguments": arguments})
    made = Worker(name=name, settings=settings, bus=bus, objects=objects, engine=make_engine(rollout), folder=folder / name)
    running = asyncio.create_task(made.run())
    try:
        yield made
        made.drain()
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def reward(bus: Bus) -> None:
    verifier = Verifier("test:reward", lambda sample: Reward(float(sample.response_tokens.sum() % 3)), False)
    scorer = Scorer(
        bus, RewardSettings(function="test:reward"), verifier, LazyTokenizer(lambda: pytest.fail("no text")), "reward.0"
    )
    consumer = await bus.consumer(bus.topology.reward_consumer())
    while True:
        for delivery in await consumer.fetch(64, 1.0):
            await scorer.handle(delivery)


@contextlib.asynccontextmanager
async def traced(collector: Collector, ratio: float) -> AsyncIterator[None]:
    tracing = begin(TelemetrySettings(endpoint=collector.url, sample_ratio=ratio), service="test", replica="0", run="r")
    assert tracing is not None
    try:
        yield
    finally:
        await asyncio.to_thread(tracing.close)
    assert spans.tracer is None


async def run_to_the_end(settings: Settings, bus: Bus, objects: ObjectStore, folder: Path, *, hand_over: bool = False) -> None:
    await seed(objects, settings.run.name)
    trainer = RealVersions(bus, objects, settings)
    trainer.pace_seconds = 0.0
    async with leading(settings, bus, objects) as leader:
        parts = [asyncio.create_task(trainer.train(until_depth=STEPS)), asyncio.create_task(reward(bus))]
        try:
            if hand_over:
                async with worker("first", settings, bus, objects, folder, tokens_per_second=0.5) as slow:
                    await until(lambda: slow.busy >= 8)
            async with worker("second", settings, bus, objects, folder):
                await until(lambda: leader.finished)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)


async def test_a_sample_is_one_tree_from_its_admission_to_its_batch_and_only_some_samples_are_traced(
    collector: Collector, run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, tmp_path: Path
) -> None:
    settings = settings_of(run_name, bus_settings, file_store_settings)
    async with connected(settings) as (bus, objects):
        async with traced(collector, 0.5):
            await run_to_the_end(settings, bus, objects, tmp_path)
        admitted = [(m, decode_control(m.data)) async for m in bus.read(CONTROL, follow=False)]
    ids = collector.by_id()
    assert len(ids) == len(collector.spans)
    tasks = [(message, record.task) for message, record in admitted if isinstance(record, TaskRecord)]
    trees = traces_of(collector)
    chosen = {(task.group, task.sample) for message, task in tasks if spans.TRACEPARENT in message.headers}
    assert {_who(span) for span in collector.named("admit")} == chosen
    assert 0 < len(chosen) < len(tasks)
    batched = [trees[span.trace_id] for span in collector.named("buffer")]
    assert batched
    for tree in batched:
        assert _shape(tree) == {
            "admit": "", "task": "admit", "rollout": "task", "turn": "rollout", "engine.generate": "turn",
            "environment.reset": "rollout", "environment.step": "turn", "trajectory": "task", "reward": "trajectory",
            "verify": "reward", "score": "reward", "buffer": "score",
        }  # fmt: skip
        named = {span.name: span for span in tree}
        batch = ids[named["buffer"].links[0]]
        assert batch.name == "batch"
        assert (named["trajectory"].trace_id, named["trajectory"].span_id) in batch.links
        assert named["admit"].start <= named["task"].start <= named["trajectory"].end <= named["reward"].end
        assert {span.trace_id for span in tree} == {named["admit"].trace_id}
    for batch in collector.named("batch"):
        assert all(ids[link].name == "trajectory" for link in batch.links)
    activated = [span.attributes["towline.version"] for span in collector.named("version.activate")]
    assert activated[0] == 0
    assert len(set(activated)) == len(activated) > 1
    assert {ids[span.trace_id, span.parent_id].name for span in collector.named("version.prove")} == {"version.activate"}


async def test_a_task_that_is_handed_over_shows_a_second_attempt_in_the_same_trace(
    collector: Collector, run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, tmp_path: Path
) -> None:
    settings = settings_of(run_name, bus_settings, file_store_settings)
    async with connected(settings) as (bus, objects), traced(collector, 1.0):
        await run_to_the_end(settings, bus, objects, tmp_path, hand_over=True)
    twice = [tree for tree in traces_of(collector).values() if sum(span.name == "task" for span in tree) == 2]
    assert len(twice) >= 8
    for tree in twice:
        first, second = sorted((span for span in tree if span.name == "task"), key=lambda span: span.start)
        assert first.parent_id == second.parent_id == next(span.span_id for span in tree if span.name == "admit")
        assert (first.attributes["towline.delivery"], second.attributes["towline.delivery"]) == (1, 2)
        assert (first.attributes["towline.replica"], second.attributes["towline.replica"]) == ("first", "second")
        assert first.attributes["towline.left"] == "drained"
        assert [span.parent_id for span in tree if span.name == "trajectory"] == [second.span_id]


async def test_without_an_endpoint_no_message_has_a_header_of_tracing(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, tmp_path: Path
) -> None:
    settings = settings_of(run_name, bus_settings, file_store_settings)
    assert begin(settings.telemetry, service="test", replica="0", run=run_name) is None
    async with connected(settings) as (bus, objects):
        await run_to_the_end(settings, bus, objects, tmp_path)
        headers = [
            name
            for spec in (CONTROL, TRAJECTORY, OUTCOME)
            async for message in bus.read(spec, follow=False)
            for name in message.headers
        ]
    assert spans.TRACEPARENT not in {name.lower() for name in headers}


@pytest.mark.parametrize("fault", ["away", "silent", "refuses"])
async def test_a_collector_that_is_of_no_use_holds_up_nothing(
    fault: str, collector: Collector, run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, tmp_path: Path
) -> None:
    collector.silent_seconds, collector.answer = (30.0 if fault == "silent" else 0.0), (503 if fault == "refuses" else 200)
    if fault == "away":
        with collecting() as gone:
            collector.url = gone.url
    settings = settings_of(run_name, bus_settings, file_store_settings)
    async with connected(settings) as (bus, objects), traced(collector, 1.0):
        await run_to_the_end(settings, bus, objects, tmp_path)
    assert collector.spans == []


def traces_of(collector: Collector) -> dict[str, list[SpanSeen]]:
    """Trace id -> its spans, where it's a sample's."""
    samples = {span.trace_id for span in collector.named("admit")}
    found: dict[str, list[SpanSeen]] = {trace: [] for trace in samples}
    for span in collector.spans:
        if span.trace_id in samples:
            found[span.trace_id].append(span)
    return found


def _shape(tree: list[SpanSeen]) -> dict[str, str]:
    """Each span's name -> its parent's; fails where a parent isn't there or a name comes twice."""
    names = {span.span_id: span.name for span in tree} | {"": ""}
    assert len({span.name for span in tree}) == len(tree), sorted(span.name for span in tree)
    return {span.name: names[span.parent_id] for span in tree}


def _who(span: SpanSeen) -> tuple[int, int]:
    return span.attributes["towline.group"], span.attributes["towline.sample"]
