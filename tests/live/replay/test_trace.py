"""What is said of a trained, a dropped and an evaluated sample of a real run; each fact is looked up in the raw streams."""

from __future__ import annotations

import json

import pytest

from live.replay.conftest import UNSCORED_GROUP
from support.bundles import towline
from support.planted_control import fold
from towline.bundle.folder import BundleSource
from towline.bus.topology import CONTROL, OUTCOME, TRAJECTORY
from towline.contract.codec import digest
from towline.contract.control import BatchRecord, DropRecord, EvalRecord, TaskRecord, decode_control
from towline.contract.outcome import Failure, decode_outcome
from towline.errors import MissingError
from towline.trace.gather import trace


async def records(source, kind):
    return [
        (message, record) async for message in source.read(CONTROL) if isinstance(record := decode_control(message.data), kind)
    ]


async def test_a_trained_sample_is_followed_to_the_version_and_the_replica(ran):
    source = BundleSource.open(ran.bundle)
    batches = await records(source, BatchRecord)
    message, batch = batches[1]
    row = batch.rows[-1]
    done = towline(ran.folder, "trace", "bundle", f"{row.group}.{row.sample}", "--json")
    assert done.returncode == 0, done.stderr
    life = json.loads(done.stdout)
    assert life["fate"] == "trained" or life["version"]["skipped"]
    assert (life["batch"]["sequence"], life["batch"]["for_depth"]) == (message.sequence, 1)
    assert life["batch"]["same_bytes"]
    assert life["staleness"] == 1 - row.least_depth
    # The version: the LOG's first of depth 2 or more.
    versions = [source.log.version(number) for number in source.log.lineage.path()[1:]]
    assert life["version"]["number"] == min(entry.number for entry in versions if entry.depth >= 2)
    task = next(m for m, r in await records(source, TaskRecord) if (r.task.group, r.task.sample) == (row.group, row.sample))
    assert [attempt["task_sequence"] for attempt in life["attempts"]] == [task.sequence]
    stored = next(m for m in [m async for m in source.read(TRAJECTORY)] if m.sequence == row.sequence)
    assert life["trajectory"]["digest"] == digest(stored.data).hex()
    assert life["score"]["reward"] == row.reward == life["group_rewards"][str(row.sample)]
    assert [ack["relation"] for ack in life["replicas"]] == ["serves a later one"]
    names = [name for name, _ in life["timeline"]]
    order = ["admitted", "pulled by a worker", "finished", "in the stream", "scored", "batched for depth 1"]
    assert [name for name in names if name in order] == order
    assert names.index(f"version {life['version']['number']} committed") > names.index("batched for depth 1")
    text = "".join(token["text"] for token in life["trajectory"]["tokens"])
    assert life["prompt"]["reference"]["answer"] == "".join(sorted(text[len("<bos>") : len("<bos>") + 5]))
    policy = [token for token in life["trajectory"]["tokens"] if token["logprob"] is not None]
    assert len(policy) == life["trajectory"]["policy_tokens"] == row.policy_tokens
    assert all(token["logprob"] <= 1e-4 for token in policy)


async def test_a_dropped_sample_is_explained_on_the_screen(ran):
    source = BundleSource.open(ran.bundle)
    drop = next(record for _, record in await records(source, DropRecord) if record.group == UNSCORED_GROUP)
    failure = next(
        outcome
        for outcome in [
            decode_outcome(message.data)
            async for message in source.read(OUTCOME, subjects=[source.topology.subject(f"outcome.failure.{UNSCORED_GROUP}.*")])
        ]
        if isinstance(outcome, Failure)
    )
    life = await trace(source, UNSCORED_GROUP, failure.sample)
    assert (life.fate, life.dropped) == ("dropped", drop.reason)
    assert life.score is None
    assert life.version is None
    assert life.trajectory is not None
    assert [seen.reason for seen in life.failures] == [failure.reason]
    assert "no answer sheet" in failure.reason
    assert failure.reason in life.explanation
    assert life.dead == [failure.reason]
    done = towline(ran.folder, "trace", "small", f"{UNSCORED_GROUP}.{failure.sample}")
    assert done.returncode == 0, done.stderr
    flat = " ".join(done.stdout.replace("│", " ").split())
    assert f"its group was dropped: {drop.reason}" in flat
    assert f"dropped: {drop.reason}" in flat


async def test_an_evaluated_sample_names_its_evaluation(ran):
    source = BundleSource.open(ran.bundle)
    _, evaluation = (await records(source, EvalRecord))[0]
    row = evaluation.rows[0]
    life = await trace(source, row.group, row.sample)
    assert (life.fate, life.evaluated_version, life.lane) == ("evaluated", evaluation.version, "eval")
    assert [attempt.exact_version for attempt in life.attempts] == [evaluation.version]


async def test_an_unknown_sample_is_refused(ran):
    with pytest.raises(MissingError, match=r"knows no sample 999\.0"):
        await trace(BundleSource.open(ran.bundle), 999, 0)


async def test_every_sample_of_the_run_has_the_decisions_that_the_whole_of_control_has(ran):
    source = BundleSource.open(ran.bundle)
    every = [(message.sequence, decode_control(message.data)) async for message in source.read(CONTROL)]
    tasks = [record.task for _, record in every if isinstance(record, TaskRecord)]
    assert tasks
    for task in tasks:
        life, expected = await trace(source, task.group, task.sample), fold(every, task.group, task.sample)
        assert [[one.task_sequence, one.reissued, one.cancelled] for one in life.attempts] == expected.attempts
        assert [[one.sequence, one.void_by] for one in life.batches] == expected.batches
        assert (life.dropped, life.evaluated_version) == (expected.dropped, expected.evaluated)
