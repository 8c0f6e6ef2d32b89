"""Rows over the bound on a real bus: masked or kept across restarts and a fork, as trainer, replay and audit count them."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from live.buffer.harness import Fleet, Trainer, connected, leading, records, seed, settings_for, working
from support.waiting import until
from towline.audit.run import audit
from towline.bus.client import Bus
from towline.bus.topology import TRAJECTORY
from towline.config import BusSettings, Settings, StoreSettings
from towline.contract.codec import digest, encode
from towline.contract.control import BatchRecord, OverStale
from towline.contract.entries import VersionEntry
from towline.contract.outcome import Score
from towline.contract.task import Task, VersionSpan
from towline.contract.trajectory import Segment, Timings, Trajectory, encode_trajectory
from towline.learner.advantages.group_normalised import group_normalised
from towline.learner.rows import Bound, assemble, open_row
from towline.store.lineage import Lineage
from towline.store.log import Log
from towline.store.objects import ObjectStore

STEPS = 8


class LongRunning(Fleet):
    """Each sample begins on a version up to three depths old, as if it had run that long, and ends on the newest."""

    async def publish(self, task: Task, task_sequence: int, version: int, *, reward: float | None = None) -> None:
        if task.lane != "train":
            await super().publish(task, task_sequence, version, reward=reward)
            return
        path = self.log.lineage.path()
        first = path[max(0, len(path) - 1 - task.seed % 4)]
        spans = (VersionSpan(2, 4, first, "start"), VersionSpan(4, 7, version, "retract"))
        if first == version or task.seed % 5 == 0:
            spans = (VersionSpan(2, 7, first, "start"),)
        mask = np.array([0, 0, 1, 1, 1, 1, 1], np.uint8)
        data = encode_trajectory(Trajectory(
            run=task.run, lane=task.lane, group=task.group, sample=task.sample, group_size=task.group_size,
            task_sequence=task_sequence, attempt=task.attempt, prompt_ref=task.prompt_ref, reference=task.reference,
            tokens=np.r_[task.prompt_tokens, 3, 4, 5, 6, 2].astype(np.int32), loss_mask=mask,
            logprobs=np.where(mask == 1, -0.5, np.nan).astype(np.float32), version_spans=spans,
            segments=(Segment(0, 2, "prompt"), Segment(2, 7, "policy")), finish="stop", sampling=task.sampling, seed=task.seed,
            engine="scripted", replica="w0", timings=Timings(pulled_at=time.time(), finished_at=time.time()),
        ))  # fmt: skip
        created = await self.bus.create(self.bus.topology.trajectory(task.group, task.sample), data)
        score = Score(
            run=self.run, lane=task.lane, group=task.group, sample=task.sample, group_size=task.group_size,
            task_sequence=task_sequence, trajectory_sequence=created.sequence, trajectory_digest=digest(data),
            reward=float(task.seed % 3), verifier="scripted", policy_tokens=5, total_tokens=7, version_spans=spans, finish="stop",
        )  # fmt: skip
        if created.won:
            await self.bus.create(self.bus.topology.score(task.group, task.sample), encode(score))


async def gathered_again(bus: Bus, objects: ObjectStore, settings: Settings) -> tuple[int, int]:
    """Every batch of the line as the trainer gathers it, with the LOG as it was then: tokens masked, tokens kept."""
    log = Log(objects, settings.run.name)
    await asyncio.to_thread(log.refresh)
    by_name = {(r.epoch, r.for_depth): r for r in await records(bus) if isinstance(r, BatchRecord)}
    masked = kept = 0
    for number in log.lineage.path()[1:]:
        entry = log.entry(number)
        assert isinstance(entry, VersionEntry)
        then = Lineage()
        for other in log.entries()[:number]:
            then.extend(other)
        record = by_name[entry.epoch, entry.depth - 1]
        found = await bus.get_many(TRAJECTORY, [row.sequence for row in record.rows])
        opened = [open_row(row, message.data if message else "lost") for row, message in zip(record.rows, found, strict=True)]
        gathered = assemble(record, opened, advantage=group_normalised, vocabulary=100, lineage=then, bound=Bound.of(settings))
        assert gathered.gaps == []
        assert gathered.rows, "a batch with nothing to train on was formed"
        assert len(gathered.rows) + gathered.masked_rows == len(record.rows)
        for row in gathered.rows:
            assert settings.buffer.over_stale == "keep" or row.staleness <= settings.buffer.max_staleness
        masked, kept = masked + gathered.masked_tokens, kept + gathered.kept_tokens
    return masked, kept


@pytest.mark.parametrize("mode", ["mask_stale_tokens", "keep"])
async def test_what_the_buffer_says_is_what_trainer_and_audit_count_across_restarts_and_a_fork(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, mode: str
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings, run={"name": run_name, "steps": STEPS}, buffer={
        "group_size": 2, "groups_per_batch": 2, "max_staleness": 1, "off_line": "keep", "over_stale": mode,
        "snapshot_every_records": 25}, trainer={"correction": "tis"}, eval={"every": 0})  # fmt: skip
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        trainer = Trainer(bus, objects, settings)
        async with working(LongRunning(bus, objects, settings)):
            async with leading(settings, bus, objects):
                await trainer.train(until_depth=5)
            forking = asyncio.create_task(trainer.train(until_depth=STEPS, base_depth=3))
            async with leading(settings, bus, objects) as leader:
                await forking
                await until(lambda: leader.finished)
                counted = dict(leader.state.dropped)
        report = await audit(bus, Log(objects, run_name), settings)
        masked, kept = await gathered_again(bus, objects, settings)
        named = [r.over_stale for r in await records(bus) if isinstance(r, BatchRecord) and isinstance(r.over_stale, OverStale)]
    assert report.clean, report.lines()
    assert report.staleness_max <= 1
    assert report.over_stale["tokens"] == masked + kept > 0
    assert (masked == 0) == (mode == "keep")
    assert {over.mode for over in named} == {"keep" if mode == "keep" else "mask"}
    assert set(counted) <= {"all_masked", "end_of_run"}
    assert report.counts.trained == STEPS * 4
