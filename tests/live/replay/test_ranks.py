"""A run of two data parallel ranks, and then of one, is trained again bit for bit: by as many ranks, from its bundle alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from live.trainer.harness import on_stage
from live.trainer.test_process import process, write_toml
from support.bundles import towline
from towline.bundle.export import export
from towline.bundle.source import BusSource
from towline.config import Settings

pytestmark = pytest.mark.slow
SPLIT_AT, STEPS = 3, 5


@pytest.fixture
async def bundle(make_settings: Callable[..., Settings], tmp_path: Path) -> Path:
    """Two ranks to depth 3; a restart with one rank and another learning rate to depth 5."""
    trainer: dict[str, Any] = {"dp": 2, "learning_rate": 1e-3, "checkpoint_every": 1}
    settings = make_settings(run={"steps": SPLIT_AT}, trainer=trainer)
    alone = make_settings(run={"steps": STEPS}, trainer=trainer | {"dp": 1, "learning_rate": 2e-3})
    async with on_stage(settings) as stage:
        async with process("trainer", write_toml(tmp_path / "two.toml", settings)) as two:
            assert await asyncio.wait_for(two.wait(), 120) == 0
        stage.buffer.settings = alone
        await stage.train(settings=alone)
        source = await BusSource.open(stage.bus, stage.objects, alone)
        done = await export(source, tmp_path / "bundle", checkpoints=[stage.versions()[1].number])
    return done.folder


async def test_ranks_are_laid_out_as_they_were(bundle: Path) -> None:
    done = await asyncio.to_thread(towline, bundle.parent, "replay", "bundle", "--verify", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["equal"], report["comparable"]) == (True, True)
    assert [result["depth"] for result in report["results"]] == list(range(1, STEPS + 1))
    assert len(report["environments"]) == 2
    middle = str(report["results"][1]["version"])
    from_checkpoint = await asyncio.to_thread(towline, bundle.parent, "replay", "bundle", "--verify", "--from", middle, "--json")
    assert from_checkpoint.returncode == 0, from_checkpoint.stderr
    assert [result["depth"] for result in json.loads(from_checkpoint.stdout)["results"]] == [3, 4, 5]

    # One process adds the same gradients in another order: that is said, and measured.
    alone = await asyncio.to_thread(towline, bundle.parent, "replay", "bundle", "--verify", "--set", "trainer.dp=1", "--json")
    report = json.loads(alone.stdout)
    assert not report["comparable"]
    first, second = (report["environments"][epoch] for epoch in sorted(report["environments"], key=int))
    assert first == {"trainer.dp": ["2", "1"], "world": ["2", "1"]}
    assert second == {}
    assert len(report["results"]) == STEPS
    assert all(result["max_abs_diff"] < 0.01 for result in report["results"] if not result["equal"])

    # Another learning rate in the ranks' part: the first step that it changes is named, and no other epoch is begun.
    parted = await asyncio.to_thread(
        towline, bundle.parent, "replay", "bundle", "--verify", "--set", "trainer.learning_rate=0.01", "--json"
    )
    assert parted.returncode == 1
    assert json.loads(parted.stdout)["parted"]["batches"] == [0]
    assert len(json.loads(parted.stdout)["results"]) == 1
