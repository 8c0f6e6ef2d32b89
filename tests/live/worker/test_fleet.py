"""A fleet whose workers are slow, die and join late trains on: nobody waits for the slowest, all serve verified versions."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from live.buffer.harness import connected, settings_for
from live.worker.fleet import Fleet, fleet, read_log
from towline.audit.run import audit
from towline.config import BusSettings, Settings, StoreSettings
from towline.contract.entries import VersionEntry

SLOW, LATE = "slow", "late"
ROLLOUT: dict[str, Any] = {
    "engine": "synthetic", "slots": 8, "ack_wait_seconds": 2.0, "poll_seconds": 0.2, "partial_every_tokens": 20,
    "arguments": {
        "vocabulary": 100, "mean_tokens": 40.0, "sigma": 0.4, "tokens_per_second": 100.0, "transient_failure_rate": 0.02,
        "pause_seconds": 0.1, "slow": {SLOW: 10.0},
    },
}  # fmt: skip


def settings_of(name: str, bus: BusSettings, store: StoreSettings, *, steps: int) -> Settings:
    return settings_for(
        name, bus, store, run={"steps": steps}, sampling={"max_tokens": 80}, rollout=ROLLOUT, eval={"every": 0},
        buffer={"group_size": 2, "groups_per_batch": 4, "max_staleness": 2, "max_attempts": 8},
    )  # fmt: skip


async def test_a_fleet_with_a_slow_a_dying_and_a_late_worker_trains_on(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, tmp_path: Path
) -> None:
    settings = settings_of(run_name, bus_settings, file_store_settings, steps=15)
    async with connected(settings) as (bus, objects):
        async with fleet(settings, bus, objects, tmp_path) as run:
            for replica in ("quick", "dying", SLOW):
                await run.start(replica)
            await run.until_depth(3)
            await run.kill("dying")
            await run.until_depth(5)
            await run.start(LATE)
            await run.until_depth(8)
            await run.kill("dying")
            await run.until_depth(15)
            assert set((await run.ended()).values()) == {0}
        await assert_well(run, settings, joined_at=5, quick=("quick",))


@pytest.mark.slow
async def test_eight_workers_of_which_one_is_ten_times_slower_and_one_dies_every_twenty_seconds_train_on(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, tmp_path: Path
) -> None:
    settings = settings_of(run_name, bus_settings, file_store_settings, steps=150)
    async with connected(settings) as (bus, objects):
        async with fleet(settings, bus, objects, tmp_path) as run:
            run.trainer.pace_seconds = 0.6
            names = [f"w{index}" for index in range(7)]
            for replica in (*names, SLOW):
                await run.start(replica)
            await run.until_depth(1)
            victims = itertools.cycle(names[1:])
            while run.trainer.depth < 130:
                before = run.trainer.depth
                if LATE not in run.workers and before > 40:
                    await run.start(LATE)
                    joined_at = before
                await asyncio.sleep(20.0)
                await run.kill(next(victims))
            await run.until_depth(150)
            assert set((await run.ended()).values()) == {0}
        assert run.deaths >= 3
        await assert_well(run, settings, joined_at=joined_at, quick=("w0",))


async def assert_well(run: Fleet, settings: Settings, *, joined_at: int, quick: tuple[str, ...]) -> None:
    """The audit is clean, and who served and delivered what is as it should be."""
    log = await read_log(run.objects, settings.run.name)
    report = await audit(run.bus, log, settings)
    assert report.clean, report.lines()
    assert (report.finished, report.depth) == (True, settings.run.steps)
    assert report.counts.trained == settings.run.steps * 8
    lineage = log.lineage
    entries = {entry.number: entry for entry in log.entries() if isinstance(entry, VersionEntry)}
    # The slow one came along without having been waited for: a quick one did several times its work meanwhile.
    work = Counter(one.replica for one in run.delivered)
    assert work[SLOW] * 2 < work[quick[0]], work
    for replica, served in run.served.items():
        assert max(lineage.depth(version) for version in served) > settings.run.steps * 0.6, (replica, sorted(served))
        for version, files in served.items():
            assert version == 0 or files in ("", entries[version].model_digest), (replica, version)
    # Nothing was delivered that was sampled from a version which its worker hadn't proved and said to serve.
    by_replica: dict[str, set[int]] = {}
    for one in run.delivered:
        by_replica.setdefault(one.replica, set()).add(one.version_end)
    assert {SLOW, LATE, *quick} <= set(by_replica)
    for replica in (SLOW, LATE, *quick):
        assert by_replica[replica] <= set(run.served[replica]), replica
    assert min(lineage.depth(version) for version in run.served[LATE]) >= joined_at
