"""A trainer whose two ranks each hold a part of every tensor (FSDP2), started as one process, publishes what one alone would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from live.trainer.harness import expected_state, on_stage
from live.trainer.test_process import process, status, write_toml
from towline.config import Settings
from towline.learner.torch_model import from_raw

Make = Callable[..., Settings]


@pytest.mark.slow
async def test_two_sharded_ranks_publish_what_one_process_would(make_settings: Make, model_folder: Path, tmp_path: Path) -> None:
    settings = make_settings(
        run={"steps": 3}, model={"source": str(model_folder), "publish_dtype": "float32"}, publisher={"verify": "sender"},
        trainer={
            "dp": 2, "parallel": "fsdp", "packing": True, "recompute": True, "learning_rate": 1e-3, "checkpoint_every": 1,
        },
    )  # fmt: skip
    config = write_toml(tmp_path / "run.toml", settings)
    async with on_stage(settings) as stage:
        async with process("trainer", config) as trainer:
            assert await asyncio.wait_for(trainer.wait(), 180) == 0
            found = await status(stage)
        versions = stage.versions()
        assert [(entry.depth, entry.skipped) for entry in versions] == [(1, ()), (2, ()), (3, ())]
        assert all(entry.checkpoint for entry in versions)
        state = stage.publisher.states[versions[-1].number]
    assert found["figures"]["finished"]
    wanted = expected_state(settings, model_folder, tmp_path, 3)
    assert state.keys() == wanted.keys()
    assert max(float((from_raw(state[name]) - from_raw(wanted[name])).abs().max()) for name in wanted) < 1e-5
