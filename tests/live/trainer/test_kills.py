"""kill -9 of the trainer, between any two of its writes and at any time: it goes on, and the weights come out the same."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from live.trainer import child
from live.trainer.harness import Stage, expected_digest, on_stage
from support.waiting import until
from towline.config import Settings
from towline.contract.entries import OpenEntry
from towline.faults import POINTS

Make = Callable[..., Settings]

REACHED = {
    "trainer.seeded": 1, "trainer.opened": 1, "trainer.batch": 4, "trainer.trained": 3, "trainer.before_checkpoint": 2,
    "trainer.checkpointed": 2, "trainer.uploaded": 3, "trainer.staged": 4, "trainer.committed": 3,
}  # fmt: skip
"""Each point, and the how-manieth time it's reached the process dies."""


def test_every_point_of_the_trainer_is_tried() -> None:
    assert set(REACHED) == {name for name in POINTS if name.startswith("trainer.")}


async def exit_code(settings: Settings, fault: str | None = None) -> int:
    process = child.start(settings, fault)
    try:
        await until(lambda: process.exitcode is not None, 20)
    finally:
        process.kill()
    assert process.exitcode is not None
    return process.exitcode


def check(stage: Stage, steps: int) -> None:
    """Each depth once on the line, each batch of the line's own epochs, every delta on a committed base."""
    versions = stage.versions()
    assert versions[-1].depth == steps
    assert versions[-1].checkpoint is not None
    by_epoch = {(record.epoch, record.for_depth) for record in stage.buffer.batches}
    depth = 0
    for entry in versions:
        assert all((entry.epoch, consumed) in by_epoch for consumed in range(depth, entry.depth))
        depth = entry.depth


@pytest.mark.parametrize("point", REACHED)
async def test_killed_at_a_point_it_goes_on(make_settings: Make, model_folder: Path, tmp_path: Path, point: str) -> None:
    settings = make_settings()
    async with on_stage(settings) as stage:
        assert await exit_code(settings, f"{point}#{REACHED[point]}") == -signal.SIGKILL
        assert await exit_code(settings) == 0
        check(stage, 4)
        assert stage.versions()[-1].model_digest == expected_digest(settings, model_folder, tmp_path, 4)


async def test_killed_again_and_again_in_async_mode_it_goes_on(make_settings: Make, model_folder: Path, tmp_path: Path) -> None:
    settings = make_settings(run={"steps": 24}, buffer={"max_staleness": 2}, trainer={"checkpoint_every": 3})
    times = random.Random(7)
    async with on_stage(settings) as stage:
        kills = 0
        for _ in range(5):
            opened = len([entry for entry in stage.log.entries() if isinstance(entry, OpenEntry)])
            process = child.start(settings)
            await until(lambda opened=opened: len([e for e in stage.log.entries() if isinstance(e, OpenEntry)]) > opened)  # type: ignore[misc]
            await asyncio.sleep(times.uniform(0.0, 0.4))
            if process.exitcode is None and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
            await until(lambda process=process: process.exitcode is not None)  # type: ignore[misc]
        assert kills >= 4
        assert await exit_code(settings) == 0
        check(stage, 24)
        assert stage.versions()[-1].model_digest == expected_digest(settings, model_folder, tmp_path, 24)


async def test_a_fenced_trainer_exits_with_75(make_settings: Make) -> None:
    settings = make_settings(run={"steps": 200})
    async with on_stage(settings) as stage:
        first = child.start(settings)
        await until(lambda: len(stage.versions()) >= 2)
        second = child.start(settings)
        await until(lambda: first.exitcode is not None)
        assert first.exitcode == 75
        assert second.exitcode is None
        second.kill()
