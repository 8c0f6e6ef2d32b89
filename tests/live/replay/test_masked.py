"""A trainer on rows over the bound: its weights are a learner's without the masked tokens, and a replay gives the same bits."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from live.trainer.harness import FakeBuffer, learner_rows, make_rows, on_stage
from towline.bundle.source import BusSource
from towline.bus.control_log import ControlLog
from towline.config import Settings
from towline.contract.control import BatchRecord, OverStale, OverStaleRow
from towline.contract.task import VersionSpan
from towline.contract.trajectory import Trajectory
from towline.delta.state import model_digest, tensor_digests
from towline.errors import InvariantError
from towline.learner.base import Row, pack_rows
from towline.learner.export import convert_folder
from towline.learner.torch_backend import TorchLearner
from towline.replay.verify import verify

STEPS = 4


def old_tokens(number: int, size: int) -> int:
    """How many of row `number`'s policy tokens version 0 sampled: none, some, or all of them."""
    return (0, 1, size)[number % 3]


class Aging(FakeBuffer):
    """Rows that began on version 0; from depth 1 on its tokens are over the bound of 0, and the records say so."""

    mode: Any = "mask"
    lie: int = 0
    """Added to each count."""

    async def _batch(self, pen: ControlLog, epoch: int, depth: int) -> BatchRecord:
        record = await super()._batch(pen, epoch, depth)
        sizes = [old_tokens(number, int(made.mask.sum())) for number, made in enumerate(make_rows(depth))]
        rows = tuple(
            msgspec.structs.replace(row, least_depth=0 if old else row.least_depth)
            for row, old in zip(record.rows, sizes, strict=True)
        )
        if depth == 0:
            return record
        over = tuple(OverStaleRow(place, old + self.lie) for place, old in enumerate(sizes) if old)
        return msgspec.structs.replace(record, rows=rows, over_stale=OverStale(mode=self.mode, max_staleness=0, rows=over))

    def _trajectory(self, made: Any, group: int, sample: int, version: int) -> Trajectory:
        whole = super()._trajectory(made, group, sample, version)
        number = next(n for n, other in enumerate(make_rows(self._depth_of(made))) if np.array_equal(other.tokens, made.tokens))
        start, end = whole.version_spans[0].start, whole.version_spans[0].end
        cut = start + old_tokens(number, end - start)
        pieces = [(start, cut, 0), (cut, end, version)]
        spans = tuple(VersionSpan(a, b, v, "start" if a == start else "retract") for a, b, v in pieces if a < b)
        return dataclasses.replace(whole, version_spans=spans)

    def _depth_of(self, made: Any) -> int:
        return next(d for d in range(STEPS) if any(np.array_equal(o.tokens, made.tokens) for o in make_rows(d)))


def without_old_tokens(depth: int) -> list[Row]:
    """The learner's rows, put together without the trainer's help."""
    rows = []
    for number, row in enumerate(learner_rows(depth)):
        chosen = np.flatnonzero(row.loss_mask)
        old = old_tokens(number, chosen.size) if depth else 0
        mask = row.loss_mask.copy()
        mask[chosen[:old]] = 0
        if mask.any():
            rows.append(dataclasses.replace(row, loss_mask=mask))
    return rows


def digest_of(settings: Settings, model: Path, scratch: Path, rows_of: Callable[[int], list[Row]]) -> str:
    convert_folder(model, scratch, settings.model.publish_dtype)
    learner = TorchLearner(scratch, settings, settings.run.seed)
    for step in range(STEPS):
        learner.train(pack_rows(step, rows_of(step)))
    return model_digest(tensor_digests(learner.state()))


def masking(make_settings: Callable[..., Settings], mode: str) -> Settings:
    return make_settings(run={"steps": STEPS}, buffer={"over_stale": mode}, trainer={"correction": "tis"})


async def test_masked_tokens_leave_no_trace_in_the_weights_and_a_replay_masks_them_too(
    make_settings: Callable[..., Settings], model_folder: Path, tmp_path: Path
) -> None:
    settings = masking(make_settings, "mask_stale_tokens")
    async with on_stage(settings) as stage:
        stage.buffer.__class__ = Aging
        await stage.train()
        trained = stage.versions()[-1]
        report = await verify(await BusSource.open(stage.bus, stage.objects, settings))
    wanted = await asyncio.to_thread(digest_of, settings, model_folder, tmp_path / "wanted", without_old_tokens)
    whole = await asyncio.to_thread(digest_of, settings, model_folder, tmp_path / "whole", learner_rows)
    assert (trained.depth, trained.missing_rows) == (STEPS, 0)
    assert trained.model_digest == wanted != whole
    assert report.equal, list(report.lines())


async def test_kept_rows_are_trained_whole_and_replayed(
    make_settings: Callable[..., Settings], model_folder: Path, tmp_path: Path
) -> None:
    settings = masking(make_settings, "keep")
    async with on_stage(settings) as stage:
        stage.buffer.__class__ = type("Keeping", (Aging,), {"mode": "keep"})
        await stage.train()
        trained = stage.versions()[-1]
        report = await verify(await BusSource.open(stage.bus, stage.objects, settings))
    whole = await asyncio.to_thread(digest_of, settings, model_folder, tmp_path / "whole", learner_rows)
    assert trained.model_digest == whole
    assert report.equal, list(report.lines())


async def test_a_record_that_miscounts_stops_the_trainer(make_settings: Callable[..., Settings]) -> None:
    async with on_stage(masking(make_settings, "mask_stale_tokens")) as stage:
        stage.buffer.__class__ = type("Lying", (Aging,), {"lie": 1})
        with pytest.raises(InvariantError, match="the record says"):
            await stage.train()
        assert [entry.depth for entry in stage.versions()] == [1]
