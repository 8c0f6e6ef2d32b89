"""Bit-exact replay of a real run, from the bundle alone, and what it says where something was changed."""

from __future__ import annotations

import dataclasses
import json
import shutil

import msgspec
import numpy as np
import pytest

from support.bundles import changed_bundle, reseal, towline
from towline.bundle.folder import BundleSource
from towline.bundle.line import read_batches, steps
from towline.bundle.manifest import MANIFEST
from towline.bus.topology import TRAJECTORY
from towline.contract.codec import digest, encode
from towline.contract.control import BatchRecord, decode_control
from towline.contract.trajectory import decode_trajectory, encode_trajectory
from towline.errors import CorruptError
from towline.replay.verify import verify


def test_a_bundle_alone_is_trained_again_bit_for_bit_in_another_directory(ran, tmp_path):
    bundle = shutil.copytree(ran.bundle, tmp_path / "elsewhere" / "copy")
    done = towline(bundle.parent, "replay", "copy", "--verify", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["equal"]
    assert report["comparable"]
    log = BundleSource.open(bundle).log
    assert [result["version"] for result in report["results"]] == log.lineage.path()[1:]
    # The digests are computed here, not copied: each is the LOG's, and no two of a run that learns are the same.
    digests = [result["replayed_digest"] for result in report["results"]]
    assert digests == [log.version(number).model_digest for number in log.lineage.path()[1:]]
    assert len(set(digests)) > 1
    assert sum(len(result["batches"]) for result in report["results"]) == 6


def test_the_run_itself_is_verified_and_stays_as_it_was(ran):
    def stored() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in (ran.folder / "store").rglob("*") if path.is_file()}

    before = stored()
    done = towline(ran.folder, "replay", "small", "--verify")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("equal: ")
    assert stored() == before


async def test_it_starts_from_a_checkpoint(ran):
    source = BundleSource.open(ran.bundle)
    report = await verify(source, start=ran.checkpoint)
    assert report.equal
    assert [result.version for result in report.results] == source.log.lineage.chain(source.log.lineage.latest, ran.checkpoint)


async def test_a_changed_behaviour_logprob_parts_at_its_step(ran, tmp_path):
    source = BundleSource.open(ran.bundle)
    planned = steps(source.log, await read_batches(source))
    target, row = await _row_with_signal(source, [step for step in planned if step.entry.depth >= 3])
    messages = await source.get_many(TRAJECTORY, [row.sequence])
    assert messages[0] is not None
    trajectory = decode_trajectory(messages[0].data)
    logprobs = np.array(trajectory.logprobs)
    place = int(np.flatnonzero(trajectory.loss_mask)[0])
    # The ratio of this token becomes 0.9 of what it was: inside the clip range or not, GRPO's loss reads it.
    logprobs[place] = min(logprobs[place] + 0.1, 0.0) if logprobs[place] < -0.2 else logprobs[place] - 0.1
    other = encode_trajectory(dataclasses.replace(trajectory, logprobs=logprobs))

    def in_batch(message):
        record = decode_control(message.data)
        if not isinstance(record, BatchRecord):
            return message.data
        rows = tuple(_sealed(r, row.sequence, other) for r in record.rows)
        return encode(msgspec.structs.replace(record, rows=rows))

    changed = changed_bundle(
        ran.bundle,
        tmp_path / "changed",
        trajectory=lambda message: other if message.sequence == row.sequence else message.data,
        control=in_batch,
    )
    report = await verify(BundleSource.open(changed))
    assert not report.equal
    assert report.comparable
    parted = report.parted
    assert parted is not None
    assert parted.version == target.entry.number
    assert parted.batches == tuple(batch.record.for_depth for batch in target.batches)
    assert parted.notes == ()
    assert parted.first_tensor in {tensor.spec.name for tensor in (await _state(source)).values()}
    assert 0 < parted.differing_tensors <= parted.tensors
    assert parted.max_abs_diff is not None
    assert parted.max_abs_diff > 0
    assert report.results[-1] == parted  # it went no further
    assert all(result.equal for result in report.results[:-1])


async def test_a_row_that_was_changed_without_its_digest_is_missing_and_said_so(ran, tmp_path):
    source = BundleSource.open(ran.bundle)
    planned = steps(source.log, await read_batches(source))
    target, row = await _row_with_signal(source, planned[1:])
    messages = await source.get_many(TRAJECTORY, [row.sequence])
    assert messages[0] is not None
    other = encode_trajectory(dataclasses.replace(decode_trajectory(messages[0].data), seed=1))
    changed = changed_bundle(
        ran.bundle, tmp_path / "changed", trajectory=lambda m: other if m.sequence == row.sequence else m.data
    )
    parted = (await verify(BundleSource.open(changed))).parted
    assert parted is not None
    assert parted.version == target.entry.number
    assert parted.notes == ("the run trained without 0 rows, this replay without 1 (digest)",)


async def test_another_learning_rate_parts_at_the_first_step_that_it_changes(ran, tmp_path):
    """Told on the command line, and recorded wrongly in the bundle: both part where the weights first change."""
    source = BundleSource.open(ran.bundle)
    first = next(step for step in steps(source.log, await read_batches(source)) if not step.entry.skipped)
    told = await verify(source, changes={"trainer.learning_rate": 4e-4})
    assert told.parted is not None
    assert told.parted.version == first.entry.number
    assert any("trainer.learning_rate" in line for line in told.lines())

    copy = shutil.copytree(ran.bundle, tmp_path / "copy")
    path = next((copy / "store" / "small" / "fingerprints").iterdir())
    recorded = json.loads(path.read_bytes())
    recorded["settings"]["trainer"]["learning_rate"] = 4e-4
    path.write_text(json.dumps(recorded))
    with pytest.raises(CorruptError, match="isn't what the bundle's manifest says"):
        BundleSource.open(copy)
    report = await verify(BundleSource.open(reseal(copy)))
    assert report.parted is not None
    assert report.parted.version == first.entry.number


async def test_another_environment_is_said_to_be_not_comparable_and_measured(ran, tmp_path):
    copy = shutil.copytree(ran.bundle, tmp_path / "copy")
    path = next((copy / "store" / "small" / "fingerprints").iterdir())
    recorded = json.loads(path.read_bytes())
    recorded["environment"]["torch"] = "2.0.0"
    recorded["settings"]["trainer"]["learning_rate"] = 4.9e-4  # stands for what another library's rounding would do
    path.write_text(json.dumps(recorded))
    report = await verify(BundleSource.open(reseal(copy)))
    assert not report.comparable
    assert report.environments[1]["torch"][0] == "2.0.0"
    assert len(report.results) == report.planned  # it goes on: the report is about how far apart they are
    assert all(result.max_abs_diff is not None for result in report.results if not result.equal)
    lines = list(report.lines())
    assert lines[0].startswith("not comparable bit for bit")
    assert any("torch was '2.0.0'" in line for line in lines)
    assert sum("  depth " in line for line in lines) == report.planned


async def _state(source):
    from towline.store.materialize import materialize

    return materialize(source.objects, source.log, 0)


def _sealed(row, sequence, data):
    if row.sequence != sequence:
        return row
    return msgspec.structs.replace(row, digest=digest(data))


async def _row_with_signal(source, planned):
    """A step and one of its rows whose group's rewards differ."""
    for step in planned:
        for batch in step.batches:
            rewards: dict[int, list[float]] = {}
            for row in batch.record.rows:
                rewards.setdefault(row.group, []).append(row.reward)
            for row in batch.record.rows:
                mean = sum(rewards[row.group]) / len(rewards[row.group])
                if len(set(rewards[row.group])) > 1 and row.reward > mean:
                    return step, row
    raise AssertionError(f"no step of the run has a signal; see {MANIFEST}")
