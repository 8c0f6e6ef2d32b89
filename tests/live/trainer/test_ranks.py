"""A trainer of two data parallel ranks, started as one process: what is missing on one is missing on both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from live.trainer.harness import expected_state, on_stage
from live.trainer.test_process import process, status, write_toml
from towline.config import Settings
from towline.contract.control import BatchRow
from towline.learner.torch_model import from_raw
from towline.store.manifest import read_manifest
from towline.trainer.ranks import exit_code_of

Make = Callable[..., Settings]


async def test_two_ranks_train_one_batch_without_the_rows_that_are_missing(
    make_settings: Make, model_folder: Path, tmp_path: Path
) -> None:
    settings = make_settings(
        run={"steps": 3}, model={"source": str(model_folder), "publish_dtype": "float32"}, publisher={"verify": "sender"},
        trainer={"dp": 2, "learning_rate": 1e-3, "checkpoint_every": 1},
    )  # fmt: skip
    config = write_toml(tmp_path / "run.toml", settings)
    async with on_stage(settings) as stage:

        def lose(depth: int, number: int, row: BatchRow) -> BatchRow:
            """A row of each rank at depth 1: one is another's bytes, the other isn't there."""
            if (depth, number) == (1, 3):
                return BatchRow(row.group, row.sample, row.sequence, b"\0" * 16, row.reward, row.least_depth, row.policy_tokens)
            if (depth, number) == (1, 6):
                return BatchRow(row.group, row.sample, 10_000, row.digest, row.reward, row.least_depth, row.policy_tokens)
            return row

        stage.buffer.tamper = lose
        async with process("trainer", config) as trainer:
            assert await asyncio.wait_for(trainer.wait(), 120) == 0
            found = await status(stage)
        versions = stage.versions()
        assert [(entry.depth, entry.missing_rows, entry.skipped) for entry in versions] == [(1, 0, ()), (2, 2, ()), (3, 0, ())]
        assert all(entry.checkpoint for entry in versions)
        manifest = read_manifest(stage.objects, versions[-1].folder, versions[-1].manifest_digest)
        state = stage.publisher.states[versions[-1].number]
    assert found["pid"] == trainer.pid
    assert (found["figures"]["finished"], found["figures"]["missing_rows"]) == (True, 2)
    assert {part.name[:9] for part in manifest.parts} == {"part-0000", "part-0001"}
    wanted = expected_state(settings, model_folder, tmp_path, 3, {1: (3, 6)})
    assert state.keys() == wanted.keys()
    assert max(float((from_raw(state[name]) - from_raw(wanted[name])).abs().max()) for name in wanted) < 1e-5


def test_the_ranks_exit_code_says_what_to_do() -> None:
    assert exit_code_of({0: 75, 1: 1}) == 75
    assert exit_code_of({1: 2, 0: -15}) == 2
    assert exit_code_of({0: 1, 1: 1}) == 1
    assert exit_code_of({1: -9}) == 1
    assert exit_code_of({0: 0, 1: 1}) == 1
