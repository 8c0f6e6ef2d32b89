"""The trainer service over tensor parallel ranks, as its supervisor starts it: versions, checkpoints, a rank that is killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from live.trainer.harness import expected_state, on_stage
from live.trainer.test_process import process, status, write_toml
from support.waiting import until
from towline.config import Settings
from towline.contract.entries import OpenEntry
from towline.delta.state import ModelState
from towline.learner.torch_model import from_raw
from towline.store.manifest import read_manifest

Make = Callable[..., Settings]
TP2: dict[str, Any] = {"backend": "megatron", "tp": 2}


def farthest(found: ModelState, wanted: ModelState) -> float:
    assert found.keys() == wanted.keys()
    return max(float((from_raw(found[name]) - from_raw(wanted[name])).abs().max()) for name in wanted)


def ranks_of(pid: int) -> list[psutil.Process]:
    """The launcher's rank processes, rank 0 first."""
    return sorted(psutil.Process(pid).children(), key=lambda child: child.environ().get("RANK", ""))


@pytest.mark.megatron
async def test_a_layout_that_the_model_cant_have_ends_in_one_line_and_exit_2(make_settings: Make, tmp_path: Path) -> None:
    settings = make_settings(trainer={"backend": "megatron", "tp": 3})
    config = write_toml(tmp_path / "run.toml", settings)
    async with on_stage(settings), process("trainer", config) as trainer:
        _, errors = await asyncio.wait_for(trainer.communicate(), 120)
    assert trainer.returncode == 2
    assert "trainer.tp = 3 doesn't divide the model's 4 attention heads" in errors.decode().splitlines()[-1]


@pytest.mark.megatron
async def test_a_run_over_two_ranks_survives_a_rank_killed_in_a_step(
    make_settings: Make, model_folder: Path, tmp_path: Path
) -> None:
    settings = make_settings(
        run={"steps": 8}, model={"source": str(model_folder), "publish_dtype": "float32"}, buffer={"max_staleness": 1},
        trainer={**TP2, "learning_rate": 1e-3}, publisher={"verify": "sender"},
    )  # fmt: skip
    config = write_toml(tmp_path / "run.toml", settings)
    async with on_stage(settings) as stage:
        stage.buffer.hold_at = 3

        def depth() -> int:
            versions = stage.versions()
            return versions[-1].depth if versions else 0

        async with process("trainer", config) as first:
            await until(lambda: depth() == 3, 120)
            assert (await status(stage))["pid"] == first.pid
            killed = ranks_of(first.pid)[1]
            stage.buffer.hold_at = 5
            killed.send_signal(signal.SIGKILL)
            assert await asyncio.wait_for(first.wait(), 60) == 1
        stage.buffer.hold_at = None
        async with process("trainer", config) as second:
            assert await asyncio.wait_for(second.wait(), 120) == 0
        versions = stage.versions()
        assert versions[-1].depth == 8
        manifest = read_manifest(stage.objects, versions[-1].folder, versions[-1].manifest_digest)
        states = stage.publisher.states
        figures = (await status(stage))["figures"]
    assert {part.name[:9] for part in manifest.parts} == {"part-0000", "part-0001"}
    assert manifest.proved
    assert farthest(states[versions[-1].number], expected_state(settings, model_folder, tmp_path, 8)) < 1e-4
    opened = [entry for entry in stage.log.entries() if isinstance(entry, OpenEntry)]
    assert len(opened) == 2
    assert opened[1].checkpoint is not None
    assert figures["finished"]
    assert 0 < figures["snapshot_seconds"] < figures["train_seconds"] + figures["commit_seconds"] + figures["idle_seconds"]
    assert np.isfinite(figures["loss"])


@pytest.mark.megatron
async def test_the_launcher_drains_its_ranks_and_leaves_none_when_its_killed(make_settings: Make, tmp_path: Path) -> None:
    settings = make_settings(run={"steps": 20}, buffer={"max_staleness": 1}, trainer=TP2)
    config = write_toml(tmp_path / "run.toml", settings)
    async with on_stage(settings) as stage:
        stage.buffer.hold_at = 2

        def depth() -> int:
            versions = stage.versions()
            return versions[-1].depth if versions else 0

        async with process("trainer", config) as drained:
            await until(lambda: depth() == 2, 120)
            ranks = ranks_of(drained.pid)
            assert len(ranks) == 2
            drained.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(drained.wait(), settings.service.drain_seconds + 10) == 0
            assert not any(rank.is_running() for rank in ranks)
        stage.buffer.hold_at = 4
        async with process("trainer", config) as killed:
            await until(lambda: depth() == 4, 120)
            ranks = ranks_of(killed.pid)
            killed.kill()
            await until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks), 30)
            await asyncio.wait_for(killed.communicate(), 30)  # its ranks had the pipe too
