"""A real run's bundle: everything in it, no secret, the same answers as the run; and what it is good for."""

from __future__ import annotations

import json

import pyarrow.parquet as pq

from support.bundles import towline
from towline.bundle.folder import BundleSource
from towline.bundle.select import Filter, newest, select
from towline.bundle.states import STATES
from towline.bus.topology import CONTROL, OUTCOME, TRAJECTORY
from towline.contract.control import BatchRecord, TaskRecord, decode_control
from towline.contract.outcome import Score, decode_outcome
from towline.contract.trajectory import decode_trajectory
from towline.trace.gather import trace


async def test_a_bundle_answers_as_the_run_does(ran):
    asked = ("--json", "--limit", "30", "--lane", "train", "--version", "0:2", "--finish", "length")
    of_run = towline(ran.folder, "trajectories", "list", "small", *asked)
    of_bundle = towline(ran.folder, "trajectories", "list", "bundle", *asked)
    assert of_run.returncode == 0, of_run.stderr
    assert of_run.stdout == of_bundle.stdout
    rows = [json.loads(line) for line in of_run.stdout.splitlines()]
    assert rows
    # An oracle of its own: every message of the stream, looked at one by one.
    source = BundleSource.open(ran.bundle)
    wanted = []
    async for message in source.read(TRAJECTORY):
        t = decode_trajectory(message.data)
        if t.lane == "train" and t.finish == "length" and any(span.version <= 2 for span in t.version_spans):
            wanted.append(message.sequence)
    assert [row["sequence"] for row in rows] == wanted[-30:]


def test_a_filter_that_nothing_matches_says_so_in_a_line(ran):
    asked = ("trajectories", "list", "bundle", "--replica", "nobody")
    assert towline(ran.folder, *asked).stdout == "no trajectory matches, or none is there yet\n"
    assert towline(ran.folder, *asked, "--json").stdout == ""
    sent = towline(ran.folder, "replay", "bundle", "--to", "screen", "--replica", "nobody")
    assert (sent.stdout, sent.stderr) == ("", "no trajectory matches\n")


async def test_rewards_are_found_and_filtered(ran):
    source = BundleSource.open(ran.bundle)
    scores = {}
    async for message in source.read(OUTCOME):
        outcome = decode_outcome(message.data)
        if isinstance(outcome, Score):
            scores[outcome.group, outcome.sample] = outcome.reward
    high = sorted(scores.values())[-5]
    found = [item async for item in select(source, Filter(reward=(high, 1e9)))]
    assert {(i.trajectory.group, i.trajectory.sample) for i in found} == {key for key, value in scores.items() if value >= high}
    last = await newest(source, Filter(), 3)
    assert [item.score and item.score.reward for item in last] == [
        scores.get((item.trajectory.group, item.trajectory.sample)) for item in last
    ]


async def test_the_state_of_every_sample_is_what_its_trace_says(ran):
    source = BundleSource.open(ran.bundle)
    found: dict[str, list[tuple[int, int]]] = {}
    for state in STATES:
        chosen = [item async for item in select(source, Filter(state=state))]
        assert {item.state for item in chosen} <= {state}
        found[state] = [(item.trajectory.group, item.trajectory.sample) for item in chosen]
    everything = [item.trajectory async for item in select(source, Filter())]
    assert sorted(key for keys in found.values() for key in keys) == sorted((t.group, t.sample) for t in everything)
    assert found["trained"]
    assert found["evaluated"]
    assert found["dropped"]
    for state, keys in found.items():
        for group, sample in keys[:3]:
            assert (await trace(source, group, sample)).fate == state


async def test_samples_are_chosen_by_environment_and_by_time(ran):
    source = BundleSource.open(ran.bundle)
    everything = [item async for item in select(source, Filter())]
    task = (await trace(source, everything[0].trajectory.group, everything[0].trajectory.sample)).prompt
    same = [item.message.sequence async for item in select(source, Filter(environment=task["environment"]))]
    assert same == [item.message.sequence for item in everything]
    assert [item async for item in select(source, Filter(environment="another"))] == []
    moment = everything[len(everything) // 2].message.at
    late = [item.message.sequence async for item in select(source, Filter(time=(moment, 1e12)))]
    assert late == [item.message.sequence for item in everything if item.message.at >= moment]


async def test_the_tables_hold_every_trajectory_and_outcome(ran):
    source = BundleSource.open(ran.bundle)
    table = pq.read_table(ran.bundle / "parquet" / "trajectories.parquet").to_pylist()
    messages = [message async for message in source.read(TRAJECTORY)]
    assert [row["sequence"] for row in table] == [message.sequence for message in messages]
    first = decode_trajectory(messages[0].data)
    assert table[0]["tokens"] == first.tokens.tolist()
    assert table[0]["version_spans"][0]["version"] == first.version_start
    outcomes = pq.read_table(ran.bundle / "parquet" / "outcomes.parquet").to_pylist()
    assert len(outcomes) == len([message async for message in source.read(OUTCOME)])


async def test_the_tables_hold_every_prompt_and_every_batch_row(ran):
    source = BundleSource.open(ran.bundle)
    tasks, rows = [], []
    async for message in source.read(CONTROL):
        record = decode_control(message.data)
        if isinstance(record, TaskRecord):
            tasks.append((message.sequence, record.task.group, record.task.sample, record.task.prompt_tokens.tolist()))
        elif isinstance(record, BatchRecord):
            rows += [(record.for_depth, r.group, r.sample, r.sequence, r.digest.hex(), r.reward) for r in record.rows]
    table = pq.read_table(ran.bundle / "parquet" / "tasks.parquet").to_pylist()
    found = [(t["sequence"], t["group"], t["sample"], t["prompt_tokens"]) for t in table if t["reissued"] is None]
    assert found == tasks
    assert all(json.loads(t["reference_json"])["answer"] for t in table)
    table = pq.read_table(ran.bundle / "parquet" / "batches.parquet").to_pylist()
    columns = ("for_depth", "group", "sample", "trajectory_sequence", "digest", "reward")
    assert [tuple(row[name] for name in columns) for row in table] == rows
    assert {row["void_by"] for row in table} == {None}


def test_no_address_and_no_secret_of_the_run_is_in_a_bundle(ran):
    settings = json.loads((ran.bundle / "settings.json").read_text())
    assert not {"bus", "store", "service", "gateway"} & set(settings)
    assert "directory" not in settings["run"]
    for path in [ran.bundle / "settings.json", ran.bundle / "manifest.json", *ran.bundle.glob("store/small/fingerprints/*")]:
        assert b"127.0.0.1" not in path.read_bytes()


def test_the_same_verifier_gives_the_same_rewards_and_another_is_compared(ran):
    code = ("--code", str(ran.code), "--json", "--lane", "eval")
    same = towline(ran.folder, "replay", "bundle", "--rescore", "sort_digits:reward", *code)
    assert same.returncode == 0, same.stderr
    summary = json.loads(same.stdout)["summary"]
    assert summary["compared"] == summary["samples"] > 0
    assert (summary["changed"], summary["failed"], summary["mean"]) == (0, 0, summary["mean_recorded"])
    other = json.loads(towline(ran.folder, "replay", "bundle", "--rescore", "picky:halved", *code).stdout)
    assert all(sample["reward"] == sample["recorded"] / 2 for sample in other["samples"])
    assert other["summary"]["changed"] == sum(sample["recorded"] != 0 for sample in other["samples"])


def test_a_group_verifier_scores_whole_groups(ran):
    done = towline(
        ran.folder, "replay", "bundle", "--rescore", "picky:ranked", "--scope", "group", "--group", "8", "--code", str(ran.code),
        "--json",
    )  # fmt: skip
    found = json.loads(done.stdout)["samples"]
    assert {sample["sample"]: sample["reward"] for sample in found} == {index: float(index) for index in range(8)}


def test_trajectories_are_sent_to_a_file_whole_or_not_at_all(ran, tmp_path):
    target = tmp_path / "out.jsonl"
    done = towline(ran.folder, "replay", "small", "--to", str(target), "--lane", "train", "--limit", "5")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert len(rows) == 5
    assert all(len(row["tokens"]) == len(row["logprobs"]) == len(row["loss_mask"]) for row in rows)
    again = towline(ran.folder, "replay", "small", "--to", str(target))
    assert (again.returncode, again.stderr.startswith("file_exists: ")) == (2, True)
    assert [path for path in tmp_path.iterdir() if "out" in path.name] == [target]
