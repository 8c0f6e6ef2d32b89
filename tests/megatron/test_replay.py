"""A run over tensor parallel ranks is trained again bit for bit, from its bundle alone; elsewhere it parts where it should."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from live.trainer.harness import on_stage
from live.trainer.test_process import process, write_toml
from support.bundles import changed_bundle, towline
from towline.bundle.export import export
from towline.bundle.folder import BundleSource
from towline.bundle.line import read_batches, steps
from towline.bundle.source import BusSource
from towline.bus.client import Message
from towline.bus.topology import TRAJECTORY
from towline.config import Settings
from towline.contract.codec import digest, encode
from towline.contract.control import BatchRecord, decode_control
from towline.contract.trajectory import decode_trajectory, encode_trajectory

STEPS = 4


def replay(bundle: Path, *options: str) -> dict[str, Any]:
    done = towline(bundle.parent, "replay", bundle.name, "--verify", "--json", *options)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


async def other_logprob(bundle: Path, target: Path) -> tuple[Path, int]:
    """A sealed copy in which one behaviour logprob of the third step's first row is another; the version of that step."""
    source = BundleSource.open(bundle)
    step = steps(source.log, await read_batches(source))[2]
    row = step.batches[0].record.rows[0]
    (message,) = await source.get_many(TRAJECTORY, [row.sequence])
    assert message is not None
    trajectory = decode_trajectory(message.data)
    logprobs = np.array(trajectory.logprobs)
    # Nearer to what the trainer finds: the ratio's clip doesn't hide it.
    logprobs[int(np.flatnonzero(trajectory.loss_mask)[0])] = -2.9
    other = encode_trajectory(dataclasses.replace(trajectory, logprobs=logprobs))

    def in_batch(message: Message) -> bytes:
        record = decode_control(message.data)
        if not isinstance(record, BatchRecord):
            return message.data
        rows = [msgspec.structs.replace(r, digest=digest(other)) if r.sequence == row.sequence else r for r in record.rows]
        return encode(msgspec.structs.replace(record, rows=tuple(rows)))

    return changed_bundle(
        bundle, target, trajectory=lambda m: other if m.sequence == row.sequence else m.data, control=in_batch
    ), step.entry.number


@pytest.mark.megatron
async def test_a_run_over_two_ranks_is_replayed_by_two(
    make_settings: Callable[..., Settings], model_folder: Path, tmp_path: Path
) -> None:
    settings = make_settings(
        run={"steps": STEPS}, model={"source": str(model_folder), "publish_dtype": "float32"}, publisher={"verify": "sender"},
        trainer={"backend": "megatron", "tp": 2, "learning_rate": 1e-3, "checkpoint_every": 1},
    )  # fmt: skip
    async with on_stage(settings) as stage:
        async with process("trainer", write_toml(tmp_path / "run.toml", settings)) as trainer:
            assert await asyncio.wait_for(trainer.wait(), 180) == 0
        middle = stage.versions()[1].number
        done = await export(await BusSource.open(stage.bus, stage.objects, settings), tmp_path / "bundle", checkpoints=[middle])
    bundle = done.folder
    whole = await asyncio.to_thread(replay, bundle)
    assert (whole["equal"], whole["comparable"]) == (True, True)
    assert [result["depth"] for result in whole["results"]] == [1, 2, 3, 4]
    assert len({result["replayed_digest"] for result in whole["results"]}) == STEPS

    rest = await asyncio.to_thread(replay, bundle, "--from", str(middle))
    assert (rest["equal"], [result["depth"] for result in rest["results"]]) == (True, [3, 4])

    changed, version = await other_logprob(bundle, tmp_path / "changed")
    parted = await asyncio.to_thread(replay, changed)
    assert (parted["parted"]["version"], parted["parted"]["batches"], parted["parted"]["notes"]) == (version, [2], [])
    assert 0 < parted["parted"]["differing_tensors"] <= parted["parted"]["tensors"]
    assert parted["parted"]["max_abs_diff"] > 0

    rate = await asyncio.to_thread(replay, bundle, "--set", "trainer.learning_rate=0.002")
    assert (rate["parted"]["batches"], len(rate["results"])) == ([0], 1)

    alone = await asyncio.to_thread(replay, bundle, "--set", "trainer.tp=1")
    assert not alone["comparable"]
    assert list(alone["environments"].values()) == [{"trainer.tp": ["2", "1"], "world": ["2", "1"]}]
    assert len(alone["results"]) == STEPS
    assert all(result["equal"] or 0 < result["max_abs_diff"] < 1e-3 for result in alone["results"])
    assert not alone["equal"]
