"""A run over two sites: a real buffer, workers as processes on either side, a mirror of the versions; the rest is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from live.buffer.harness import settings_for
from live.worker.fleet import Fleet, fleet, read_log
from support.waiting import until
from towline.audit.run import audit
from towline.bus.client import Bus
from towline.bus.topology import CONTROL, TRAJECTORY
from towline.config import BusSettings, Settings, StoreSettings
from towline.contract.control import BatchRecord, DropRecord, ReissueRecord, TaskRecord, decode_control
from towline.contract.trajectory import Trajectory, decode_trajectory
from towline.local.toml import settings_toml
from towline.store.mirror import Mirror
from towline.store.objects import ObjectStore, open_store

NEAR, FAR = "near", "far"
ROLLOUT: dict[str, Any] = {
    "engine": "synthetic", "slots": 8, "ack_wait_seconds": 3.0, "poll_seconds": 0.2, "partial_every_tokens": 20,
    "arguments": {"vocabulary": 100, "mean_tokens": 40.0, "sigma": 0.4, "tokens_per_second": 100.0},
}  # fmt: skip
SAMPLES = 8
"""Of a batch."""


def settings_of(run: str, bus: BusSettings, store: StoreSettings, folder: Path, *, steps: int, **buffer: Any) -> Settings:
    return settings_for(
        run, bus, store, run={"steps": steps, "directory": str(folder / "runs")}, sampling={"max_tokens": 80}, rollout=ROLLOUT,
        eval={"every": 0}, buffer={"group_size": 2, "groups_per_batch": 4, "max_staleness": 2} | buffer,
    )  # fmt: skip


async def start(run: Fleet, replica: str, settings: Settings, prefix: Sequence[str] = ()) -> None:
    """A worker process that comes to the bus and store of `settings`."""
    config = run.folder / f"{replica}.toml"
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    config.write_text(settings_toml(settings))
    with (run.folder / f"{replica}.log").open("ab") as log:
        run.workers[replica] = await asyncio.create_subprocess_exec(
            *prefix, sys.executable, "-m", "towline.rollout_worker", "--config", str(config), "--replica", replica,
env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, stdout=log,
        )  # fmt: skip


@contextlib.asynccontextmanager
async def mirrored(source: ObjectStore, target: ObjectStore, run: str, up: Callable[[], bool]) -> AsyncIterator[None]:
    """What `towline store mirror --follow` does, while the line is up."""

    async def follow() -> None:
        copy = Mirror(source, target, run)
        while True:
            if up():
                await asyncio.to_thread(copy.copy)
            await asyncio.sleep(0.1)

    following = asyncio.create_task(follow())
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def delivered(bus: Bus) -> int:
    return (await bus.stream_state(TRAJECTORY)).last_sequence


class Seen:
    """What the two logs and the streams say of a run that has ended."""

    def __init__(self) -> None:
        self.admitted: Counter[str] = Counter()
        """Samples, by the site whose workers they were for first."""
        self.moved = 0
        """Samples that were issued at home after their site had fallen silent."""
        self.trained: Counter[str] = Counter()
        """Samples, by who generated them."""
        self.twice: dict[tuple[int, int], list[str]] = {}
        """Samples that stand in home's TRAJECTORY more than once, and by whom, in its order."""
        self.tokens_twice = 0
        """Policy tokens of all but the first of those."""
        self.tokens = 0
        self.at_site = 0
        self.between = 0
        """The far side's samples that were finished between two moments; `between_trained`: and trained."""
        self.between_trained = 0
        self.stale = 0
        """Samples of groups that were dropped as stale."""


async def look(home: Bus, site: Bus, between: tuple[float, float] = (0.0, 0.0)) -> Seen:
    """`between`: two moments, Unix seconds."""
    seen = Seen()
    by_sequence: dict[int, Trajectory] = {}
    by_sample: dict[tuple[int, int], list[Trajectory]] = {}
    async for message in home.read(TRAJECTORY, follow=False):
        one = decode_trajectory(message.data)
        by_sequence[message.sequence] = one
        by_sample.setdefault((one.group, one.sample), []).append(one)
        seen.tokens += one.policy_tokens
    for key, found in by_sample.items():
        if len(found) > 1:
            seen.twice[key] = [one.replica for one in found]
            seen.tokens_twice += sum(one.policy_tokens for one in found[1:])
    async for message in home.read(CONTROL, follow=False):
        match decode_control(message.data):
            case TaskRecord(task=task):
                seen.admitted[task.issued_to] += 1
            case ReissueRecord(reason="site_silent"):
                seen.moved += 1
            case BatchRecord(rows=rows):
                trained = [by_sequence[row.sequence] for row in rows]
                seen.trained.update(one.replica for one in trained)
                seen.between_trained += sum(_within(one, between) for one in trained)
            case DropRecord(reason="stale", samples=samples):
                seen.stale += samples
    async for message in site.read(TRAJECTORY, follow=False):
        one = decode_trajectory(message.data)
        assert one.replica == FAR
        seen.at_site += 1
        seen.between += _within(one, between)
        assert any(other.replica == FAR for other in by_sample.get((one.group, one.sample), [])), "lost on its way home"
    return seen


def _within(one: Trajectory, between: tuple[float, float]) -> bool:
    return one.replica == FAR and between[0] <= one.timings.finished_at <= between[1]


async def converged(run: Fleet, settings: Settings, copy: ObjectStore) -> None:
    """The run is over and whole; the far store holds the LOG that home's does, and the far worker serves its head."""
    log = await read_log(run.objects, settings.run.name)
    report = await audit(run.bus, log, settings)
    assert report.clean, report.lines()
    assert (report.finished, report.depth) == (True, settings.run.steps)
    assert report.counts.trained == settings.run.steps * SAMPLES
    assert report.staleness_max <= settings.buffer.max_staleness

    async def same() -> bool:
        far = await read_log(copy, settings.run.name)
        return (far.next_number, far.head_digest) == (log.next_number, log.head_digest)

    await until(same)


@contextlib.asynccontextmanager
async def under_way(settings: Settings, bus: Bus, folder: Path, begin: asyncio.Event | None = None) -> AsyncIterator[Fleet]:
    async with fleet(settings, bus, open_store(settings.store), folder, begin) as run:
        yield run
