"""Whole runs of a trainer: what it commits is what the batches teach, in both modes, and it ends when the run does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from live.trainer.harness import expected_digest, on_stage
from support.waiting import until
from towline.bus.topology import CONTROL, TRAJECTORY
from towline.config import Settings, StoreSettings
from towline.contract.control import BatchRow
from towline.contract.entries import OpenEntry, QuarantineEntry, VersionEntry
from towline.errors import FencedError, InvariantError, UsageError
from towline.learner.export import convert_folder
from towline.learner.torch_backend import TorchLearner
from towline.store import keys
from towline.store.keys import new_write_id
from towline.store.log import Log
from towline.trainer import staging

Make = Callable[..., Settings]


@pytest.mark.parametrize("kind", ["file", "s3"])
async def test_a_sync_run_commits_each_batch_and_ends(
    make_settings: Make, model_folder: Path, tmp_path: Path, s3_settings: StoreSettings, kind: str
) -> None:
    settings = make_settings(**({"store": s3_settings} if kind == "s3" else {}))
    async with on_stage(settings) as stage:
        await stage.train()
        versions = stage.versions()
        assert [entry.depth for entry in versions] == [1, 2, 3, 4]
        assert [entry.checkpoint is not None for entry in versions] == [False, True, False, True]
        assert [entry.step for entry in versions] == [2, 4, 6, 8]
        assert all(entry.representation == "delta" and 0 < entry.density <= 1 for entry in versions)
        assert versions[-1].model_digest == expected_digest(settings, model_folder, tmp_path, 4)
        assert [record.for_depth for record in stage.buffer.batches] == [0, 1, 2, 3]
        control = [message async for message in stage.bus.read(CONTROL, follow=False) if message.subject.endswith(".batch")]
        assert [entry.batch_cursor for entry in versions] == [message.sequence for message in control]
        assert stage.figures.depth == 4
        assert stage.figures.versions == 4
        assert stage.figures.wire_bytes == sum(entry.wire_bytes for entry in versions)
        assert stage.figures.idle_seconds > 0


async def test_the_probe_is_what_the_published_weights_say(make_settings: Make, model_folder: Path, tmp_path: Path) -> None:
    settings = make_settings(run={"steps": 1})
    async with on_stage(settings) as stage:
        await stage.train()
        entry = stage.versions()[0]
        base = stage.log.entry(0)
        assert entry.probe is not None
        assert entry.probe.tokens == base.probe.tokens  # type: ignore[union-attr]
        convert_folder(model_folder, tmp_path / "model", "bfloat16")
        learner = TorchLearner(tmp_path / "model", settings, 0)
        published = stage.publisher.states[entry.number]
        assert list(entry.probe.logprobs) == pytest.approx(learner.logprobs(entry.probe.tokens, published), abs=1e-5)
        assert list(entry.probe.logprobs) != pytest.approx(list(base.probe.logprobs), abs=1e-3)  # type: ignore[union-attr]


async def test_an_async_run_coalesces_and_consumes_every_batch_once(
    make_settings: Make, model_folder: Path, tmp_path: Path
) -> None:
    settings = make_settings(run={"steps": 9}, buffer={"max_staleness": 3}, trainer={"checkpoint_every": 3})
    async with on_stage(settings) as stage:
        stage.publisher.delay_seconds = 0.1
        await stage.train()
        depths = [entry.depth for entry in stage.versions()]
        assert depths[-1] == 9
        assert len(depths) < 9
        assert stage.figures.batches == 9
        assert stage.versions()[-1].model_digest == expected_digest(settings, model_folder, tmp_path, 9)
        assert all(staged.base in {0, *(entry.number for entry in stage.versions())} for staged in stage.publisher.seen)


async def test_what_is_missing_is_dropped_by_name_and_the_rest_is_trained(
    make_settings: Make, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("towline.trainer.rows.ROW_DEADLINE_SECONDS", 0.2)
    settings = make_settings()

    def tamper(depth: int, number: int, row: BatchRow) -> BatchRow:
        if (depth, number) == (0, 1):
            return BatchRow(row.group, row.sample, 10_000, row.digest, row.reward, row.least_depth, row.policy_tokens)
        if (depth, number) in {(0, 6), (2, 0)} or depth == 3:
            return BatchRow(row.group, row.sample, row.sequence, bytes(16), row.reward, row.least_depth, row.policy_tokens)
        return row

    async with on_stage(settings) as stage:
        stage.buffer.tamper = tamper
        stage.buffer.garbage = {(1, 3)}
        await stage.train()
        versions = stage.versions()
        assert [entry.missing_rows for entry in versions] == [2, 1, 1, 8]
        assert [entry.skipped for entry in versions] == [(), (), (), (3,)]
        assert (versions[3].density, versions[3].model_digest) == (0.0, versions[2].model_digest)
        leave_out = {0: (1, 6), 1: (3,), 2: (0,)}
        assert versions[2].model_digest == expected_digest(settings, model_folder, tmp_path, 3, leave_out)
        assert (await stage.bus.stream_state(TRAJECTORY)).messages == 32


async def test_a_row_that_is_too_stale_stops_the_run(make_settings: Make) -> None:
    async with on_stage(make_settings(buffer={"max_staleness": 1})) as stage:
        stage.buffer.version_for = lambda depth: 0
        with pytest.raises(InvariantError, match="staleness 2 is over 1"):
            await stage.train()


async def test_staged_is_sent_again_until_somebody_hears(make_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "RESEND_SECONDS", 0.2)
    async with on_stage(make_settings(run={"steps": 1})) as stage:
        stage.publisher.deaf_to = 2
        await stage.train()
        assert len(stage.publisher.seen) == 3
        assert len({staged.write_id for staged in stage.publisher.seen}) == 1


async def test_a_refused_version_is_staged_anew(make_settings: Make, model_folder: Path, tmp_path: Path) -> None:
    settings = make_settings(run={"steps": 2})
    async with on_stage(settings) as stage:
        stage.publisher.refuse = 2
        await stage.train()
        assert len({staged.write_id for staged in stage.publisher.seen}) == 4
        assert stage.versions()[-1].model_digest == expected_digest(settings, model_folder, tmp_path, 2)


async def test_a_version_that_is_always_refused_is_a_named_end(make_settings: Make) -> None:
    async with on_stage(make_settings()) as stage:
        stage.publisher.refuse = 100
        with pytest.raises(InvariantError, match="refused the version 3 times") as caught:
            await stage.train()
        assert caught.value.code == "commit_failed"


async def test_a_newer_open_fences(make_settings: Make) -> None:
    async with on_stage(make_settings()) as stage:
        stage.publisher.delay_seconds = 0.5
        training = asyncio.create_task(stage.train())
        await until(lambda: bool(stage.publisher.seen))
        await asyncio.to_thread(stage.log.append, lambda log: opened_on(log, 0))
        with pytest.raises(FencedError):
            await training
        assert stage.versions() == []


async def test_an_open_that_is_overtaken_decides_anew(make_settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings(run={"steps": 2})
    chosen: list[int] = []

    def overtake(log: Log, base: int, state: object) -> None:
        chosen.append(base)
        if len(chosen) == 1:
            other = Log(stage.objects, settings.run.name)
            other.refresh()
            other.append(lambda log: opened_on(log, 0))

    monkeypatch.setattr("towline.trainer.opening._check_weights", overtake)
    async with on_stage(settings) as stage:
        await stage.train()
        stage.log.refresh()
        opened = [entry.number for entry in stage.log.entries() if isinstance(entry, OpenEntry)]
        assert opened == [1, 2]
        assert chosen == [0, 0]
        assert [entry.epoch for entry in stage.versions()] == [2, 2]


def opened_on(log: Log, base: int) -> OpenEntry:
    """Another trainer's `open`."""
    return OpenEntry(
        number=log.next_number, prev=log.head_digest, write_id=new_write_id(), at=0.0, base=base, base_digest=log.digest(base),
        depth=log.lineage.depth(base), batch_cursor=0, checkpoint=None,
    )  # fmt: skip


async def test_a_quarantined_head_sends_the_trainer_back_to_a_good_checkpoint(make_settings: Make) -> None:
    settings = make_settings(run={"steps": 6})
    async with on_stage(settings) as stage:
        training = asyncio.create_task(stage.train())
        await until(lambda: len(stage.versions()) >= 3)
        bad = stage.versions()[2]

        def build(log: object) -> QuarantineEntry:
            return QuarantineEntry(
                number=stage.log.next_number, prev=stage.log.head_digest, write_id=new_write_id(), at=0.0, version=bad.number,
                reason="scripted",
            )  # fmt: skip

        await asyncio.to_thread(stage.log.append, build)
        with pytest.raises(FencedError, match="quarantined"):
            await training
        await stage.train()
        assert [entry.depth for entry in stage.versions()] == [1, 2, 3, 4, 5, 6]
        assert bad.number not in stage.log.lineage.path()


async def test_a_trainer_drained_in_a_step_commits_it_with_a_checkpoint_and_the_next_goes_on(
    make_settings: Make, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(run={"steps": 6}, trainer={"checkpoint_every": 100})
    async with on_stage(settings) as stage:
        begun: list[str] = []

        def drain_in_the_third_step(name: str) -> None:
            begun.extend([name] if name == "trainer.batch" else [])
            if len(begun) == 3:
                stage.draining.set()

        with monkeypatch.context() as patch:
            patch.setattr("towline.faults.point", drain_in_the_third_step)
            await stage.train()
        drained = stage.versions()
        assert [entry.depth for entry in drained] == [1, 2, 3]
        assert [entry.checkpoint is not None for entry in drained] == [False, False, True]
        stage.draining.clear()
        await stage.train()
        opened = [entry for entry in stage.log.entries() if isinstance(entry, OpenEntry)]
        assert [entry.base for entry in opened] == [0, drained[-1].number]
        assert stage.versions()[-1].model_digest == expected_digest(settings, model_folder, tmp_path, 6)


async def test_the_end_of_the_data_ends_the_trainer(make_settings: Make) -> None:
    async with on_stage(make_settings(run={"steps": 50})) as stage:
        stage.buffer.last_depth = 3
        await stage.train()
        assert stage.versions()[-1].depth == 3
        entries = len(stage.log.entries())
        await stage.train()
        assert len(stage.log.entries()) == entries


async def test_a_finished_run_opens_nothing_and_goes_on_with_more_steps(
    make_settings: Make, model_folder: Path, tmp_path: Path
) -> None:
    settings = make_settings(run={"steps": 2})
    longer = make_settings(run={"steps": 4})
    async with on_stage(settings) as stage:
        await stage.train()
        await until(lambda: len(stage.log.entries()) == 4)
        await stage.train()
        assert len(stage.log.entries()) == 4
        await asyncio.sleep(0.1)
    async with on_stage(longer) as stage:
        await stage.train()
        assert stage.versions()[-1].depth == 4
        opened = [entry for entry in stage.log.entries() if isinstance(entry, OpenEntry)]
        assert [entry.depth for entry in opened] == [0, 2]


async def test_a_broken_checkpoint_gives_way_to_an_older_one(make_settings: Make, model_folder: Path, tmp_path: Path) -> None:
    settings = make_settings()
    longer = make_settings(run={"steps": 5})
    async with on_stage(settings) as stage:
        await stage.train()
        newest = stage.versions()[-1]
        assert newest.checkpoint is not None
        key = f"{keys.checkpoint_folder(settings.run.name, newest.checkpoint)}/weights.safetensors"
        stage.objects.put(key, stage.objects.get(key)[:-1] + b"!")
    async with on_stage(longer) as stage:
        await stage.train()
        opened = [entry for entry in stage.log.entries() if isinstance(entry, OpenEntry)]
        assert [entry.depth for entry in opened] == [0, 2]
        assert newest.number not in stage.log.lineage.path()
        assert [entry.depth for entry in stage.versions()] == [1, 2, 3, 4, 5]


async def test_without_any_readable_checkpoint_the_run_stops_by_name(make_settings: Make) -> None:
    settings = make_settings(run={"steps": 2})
    async with on_stage(settings) as stage:
        await stage.train()
        for entry in stage.versions():
            if entry.checkpoint is not None:
                stage.objects.delete(keys.manifest(keys.checkpoint_folder(settings.run.name, entry.checkpoint)))
    async with on_stage(make_settings(run={"steps": 4})) as stage:
        entries = len(stage.log.refresh())
        with pytest.raises(InvariantError) as caught:
            await stage.train()
        assert caught.value.code == "no_checkpoint"
        stage.log.refresh()
        assert len(stage.log.entries()) == entries


async def test_entry_0_counts_while_no_checkpoint_was_ever_committed(make_settings: Make) -> None:
    settings = make_settings(run={"steps": 4}, trainer={"checkpoint_every": 100})
    async with on_stage(settings) as stage:
        training = asyncio.create_task(stage.train())
        await until(lambda: len(stage.versions()) >= 1)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        stage.log.refresh()
        assert not any(isinstance(entry, VersionEntry) and entry.checkpoint for entry in stage.log.entries())
        await stage.train()
        opened = [entry for entry in stage.log.entries() if isinstance(entry, OpenEntry)]
        assert [entry.base for entry in opened] == [0, 0]
        assert [entry.depth for entry in stage.versions()] == [1, 2, 3, 4]


async def test_another_publish_dtype_than_the_runs_is_refused(make_settings: Make, model_folder: Path) -> None:
    async with on_stage(make_settings(run={"steps": 1})) as stage:
        await stage.train()
    changed = make_settings(model={"source": str(model_folder), "publish_dtype": "float32"})
    async with on_stage(changed) as stage:
        with pytest.raises(UsageError, match="publish_dtype"):
            await stage.train()
