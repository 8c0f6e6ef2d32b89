"""A replay follows the LOG: over a killed trainer's fork, with each epoch's own settings, missing rows and skipped steps."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from live.trainer.harness import on_stage
from support.bundles import reseal
from support.waiting import until
from towline.bundle.export import export
from towline.bundle.folder import BundleSource
from towline.bundle.source import BusSource
from towline.config import Settings
from towline.contract.control import BatchRow
from towline.contract.entries import OpenEntry
from towline.errors import MissingError
from towline.replay.verify import verify
from towline.store import keys


def tamper(depth: int, number: int, row: BatchRow) -> BatchRow:
    """One row of the batch for depth 1 isn't what its record says, and none of the batch for depth 4 is."""
    return msgspec.structs.replace(row, digest=bytes(16)) if (depth, number) == (1, 2) or depth == 4 else row


async def test_a_replay_follows_forks_settings_missing_rows_and_skipped_steps(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    settings = make_settings(run={"steps": 6}, trainer={"checkpoint_every": 2})
    changed = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"learning_rate": 3e-3})})
    async with on_stage(settings) as stage:
        stage.buffer.tamper = tamper
        training = asyncio.create_task(stage.train())
        await until(lambda: len(stage.versions()) >= 3)
        training.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await training
        await stage.train(settings=changed)
        source = await BusSource.open(stage.bus, stage.objects, settings)
        done = await export(source, tmp_path / "bundle")
    bundle = BundleSource.open(done.folder)
    epochs = [entry.number for entry in bundle.log.entries() if isinstance(entry, OpenEntry)]
    assert len(epochs) == 2
    abandoned = set(bundle.log.lineage.versions()) - set(bundle.log.lineage.path())
    assert abandoned  # the fork went below the killed trainer's head: otherwise this tests nothing
    assert bundle.manifest.left_out == ()

    report = await verify(bundle)
    assert report.equal, list(report.lines())
    assert {result.epoch for result in report.results} == set(epochs)
    line = [bundle.log.version(number) for number in bundle.log.lineage.path()[1:]]
    assert [entry.missing_rows for entry in line if entry.missing_rows] == [1, 8]
    assert [entry.skipped for entry in line if entry.skipped] == [(4,)]

    with pytest.raises(MissingError, match=f"export it with --checkpoint {line[-1].base}|has no checkpoint"):
        await verify(bundle, start=line[-1].base)

    # Without its fingerprint the second epoch is taken for the first one's settings, and parts where it begins.
    (done.folder / "store" / keys.fingerprint(settings.run.name, epochs[1])).unlink()
    report = await verify(BundleSource.open(reseal(done.folder)))
    assert report.unrecorded == [epochs[1]]
    assert not report.comparable
    assert report.parted is not None
    assert report.parted.epoch == epochs[1]
    assert report.parted.version == next(entry.number for entry in line if entry.epoch == epochs[1])
    assert [dataclasses.asdict(result)["equal"] for result in report.results if result.epoch == epochs[0]] == [True] * sum(
        entry.epoch == epochs[0] for entry in line
    )
