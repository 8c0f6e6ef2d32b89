"""A second trainer, in a run of its own, is fed what another run recorded; that run stays exactly as it was."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live.replay.conftest import Ran
from support.bundles import towline
from support.waiting import until
from towline.bundle.folder import BundleSource
from towline.bundle.select import Filter
from towline.bus.topology import ACKS, STREAMS
from towline.cli.replay_into import Into, into_trainer
from towline.contract.entries import OpenEntry
from towline.errors import TowlineError
from towline.local.access import open_run
from towline.local.run_directory import Processes, RunDirectory
from towline.replay.plan import batched_anew, recorded
from towline.store.log import Log

Snapshot = dict[str, Any]


async def everything(directory: RunDirectory) -> Snapshot:
    """All that a run has in its streams, and every object of its store, byte for byte."""
    found: Snapshot = {}
    async with open_run(directory, directory.load()) as access:
        for spec in STREAMS:
            state = await access.bus.stream_state(spec)
            found[spec.key] = (state.created_at, state.first_sequence, state.last_sequence, state.messages, state.bytes)
            found[f"{spec.key} messages"] = [
                (message.sequence, message.subject, message.data) async for message in access.bus.read(spec, follow=False)
            ]
        found["acks"] = await access.bus.kv(ACKS).items()
        for info in access.objects.list(""):
            if info.key.startswith("small/"):
                found[info.key] = (info.size, info.modified, access.objects.get(info.key))
    return found


@pytest.fixture
def folder(ran: Ran) -> Iterator[Path]:
    """Where the run and its replays are."""
    before = set((ran.folder / "runs").iterdir())
    yield ran.folder
    for path in set((ran.folder / "runs").iterdir()) - before:
        towline(ran.folder, "down", path.name)
        shutil.rmtree(path)


async def test_the_same_settings_give_the_same_weights_and_the_run_stays_as_it_was(ran: Ran, folder: Path) -> None:
    original = RunDirectory(folder / "runs" / "small")
    before = await everything(original)
    assert any(key.startswith("small/log/") for key in before)
    done = await asyncio.to_thread(towline, folder, "replay", "small", "--into", "trainer", "--name", "again", "--json")
    assert done.returncode == 0, done.stderr
    assert await everything(original) == before
    comparison = json.loads(done.stdout)
    assert (comparison["run"], comparison["of"], comparison["batches"], comparison["missing_rows"]) == ("again", "small", 6, 0)
    assert comparison["changed"] == {}
    # Every depth that has a version in both has the same bits; a run that coalesced steps lacks some.
    line = BundleSource.open(ran.bundle).log
    depths = {line.version(number).depth: line.version(number).model_digest for number in line.lineage.path()[1:]}
    again = RunDirectory(folder / "runs" / "again")
    async with open_run(again, again.load()) as access:
        log = Log(access.objects, "again")
        log.refresh()
    own = {log.version(number).depth: log.version(number).model_digest for number in log.lineage.path()[1:]}
    assert set(own) == set(range(1, 7))
    assert {depth: own[depth] for depth in depths} == depths
    assert {point["depth"] for point in comparison["points"] if point["equal"]} == set(depths)
    for point in comparison["points"]:
        assert point["figures"] == point["recorded"]
        assert set(point["figures"]) >= {"loss", "mismatch_kl", "reward_mean"}
    # A run like any other: its audit is clean.
    audited = await asyncio.to_thread(towline, folder, "audit", "again", "--json")
    assert audited.returncode == 0, audited.stdout


@pytest.mark.slow
async def test_another_configuration_parts_and_its_curve_stands_beside_the_runs(ran: Ran, folder: Path) -> None:
    options = ("--into", "trainer", "--name", "faster", "--set", "trainer.learning_rate=2e-3", "--json")
    done = await asyncio.to_thread(towline, folder, "replay", "small", *options)
    assert done.returncode == 0, done.stderr
    comparison = json.loads(done.stdout)
    assert comparison["changed"] == {"trainer.learning_rate": [0.0005, 0.002]}
    assert any(point["equal"] is False and point["max_abs_diff"] > 0 for point in comparison["points"])
    first = next(point for point in comparison["points"] if point["figures"]["rows"])
    assert first["figures"]["mismatch_kl"] == first["recorded"]["mismatch_kl"]  # before the first step both are the base
    assert any(point["figures"]["loss"] != point["recorded"]["loss"] for point in comparison["points"])
    assert json.loads((folder / "runs" / "faster" / "replay.json").read_text())["points"] == comparison["points"]


@pytest.mark.slow
async def test_a_bundle_is_fed_in_batches_of_another_size_and_from_another_version(ran: Ran, folder: Path) -> None:
    options = (
        "--into",
        "trainer",
        "--name",
        "small-batches",
        "--rebatch",
        "3",
        "--lane",
        "train",
        "--set",
        f"run.directory={folder}/runs",
    )
    done = await asyncio.to_thread(towline, folder, "replay", "bundle", *options, "--code", str(ran.code), "--json")
    assert done.returncode == 0, done.stderr
    comparison = json.loads(done.stdout)
    assert (comparison["batches"], comparison["groups"]) == (8, 24)
    assert all(point["equal"] is None for point in comparison["points"])
    assert [point["figures"]["rows"] is not None for point in comparison["points"]] == [True] * 8
    options = ("--into", "trainer", "--name", "later", "--from", str(ran.checkpoint), "--set", f"run.directory={folder}/runs")
    done = await asyncio.to_thread(towline, folder, "replay", "bundle", *options, "--speed", "100", "--json")
    assert done.returncode == 0, done.stderr
    log = BundleSource.open(ran.bundle).log
    left = log.lineage.depth(log.lineage.latest) - log.lineage.depth(ran.checkpoint)
    assert [point["recorded_depth"] for point in json.loads(done.stdout)["points"]] == list(range(7 - left, 7))


@pytest.mark.slow
async def test_a_second_trainer_that_is_killed_goes_on_and_ends_with_the_same_weights(ran: Ran, folder: Path) -> None:
    """It opens below its head, since not every version has a checkpoint: what it was fed is fed again."""
    command = [sys.executable, "-m", "towline.cli.main", "replay", "small", "--into", "trainer", "--name", "killed", "--json"]
    command += ["--set", "trainer.checkpoint_every=3", "--step"]
    feeding = await asyncio.create_subprocess_exec(*command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert feeding.stdin is not None
    directory = RunDirectory(folder / "runs" / "killed")

    def committed() -> int:
        log = directory.log_path("trainer")
        return log.read_text().count('"event": "committed"') if log.is_file() else 0

    try:
        for depth in range(1, 5):  # four batches, one version each; the third has a checkpoint
            feeding.stdin.write(b"\n")
            await feeding.stdin.drain()
            await until(lambda depth=depth: committed() == depth, 60)
        Processes(directory).alive()["trainer"].kill()
        async with asyncio.timeout(120):
            out, _ = await feeding.communicate(b"\n\n")
    finally:
        with contextlib.suppress(ProcessLookupError):
            feeding.kill()
    assert feeding.returncode == 0
    comparison = json.loads(out)
    assert all(point["equal"] in (True, None) for point in comparison["points"])
    assert comparison["points"][-1]["equal"]
    async with open_run(directory, directory.load()) as access:
        log = Log(access.objects, "killed")
        log.refresh()
    assert sum(isinstance(entry, OpenEntry) for entry in log.entries()) == 2
    assert len(log.lineage.versions()) > len(log.lineage.path())  # the killed one's last version is off the line
    audited = await asyncio.to_thread(towline, folder, "audit", "killed", "--json")
    assert audited.returncode == 0, audited.stdout


async def test_the_plan_takes_whole_groups_of_what_is_chosen(ran: Ran) -> None:
    source = BundleSource.open(ran.bundle)
    whole = await recorded(source, 0, None, Filter())
    assert [batch.recorded_depth for batch in whole.batches] == list(range(6))
    assert len(list(whole.rows)) == 6 * 4 * 8
    row = whole.batches[2].rows[0]
    one = await recorded(source, 0, None, Filter(group=row.group))
    assert [(batch.recorded_depth, len(batch.rows)) for batch in one.batches] == [(2, 8)]
    anew = await batched_anew(source, 5, Filter())
    assert {row.group for row in anew.rows} == {row.group for row in whole.rows}
    assert [len(batch.rows) for batch in anew.batches] == [40, 40, 40, 40, 32]
    assert {(row.group, row.sample): row.reward for row in anew.rows} == {
        (row.group, row.sample): row.reward for row in whole.rows
    }


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def files_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*"))


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"name": "small"}, "run_name"),
        ({"wanted": Filter(group=99_999)}, "empty"),
        ({"groups_per_batch": 4, "wanted": Filter(lane="eval")}, "lane"),
        ({"changes": {"trainer.nothing": 1}}, "override"),
        ({"start": 99_999}, "version_missing"),
    ],
)
async def test_what_cant_be_fed_is_one_line_and_makes_nothing(ran: Ran, empty: Path, asked: dict[str, Any], code: str) -> None:
    whole = {
        "name": "x", "config": None, "changes": {}, "code": None, "start": 0, "until": None, "groups_per_batch": None,
        "wanted": Filter(), "speed": 0.0, "wait": None,
    }  # fmt: skip
    with pytest.raises(TowlineError) as refused:
        await into_trainer(BundleSource.open(ran.bundle), str(ran.bundle), Into(**(whole | asked)))
    assert refused.value.code == code
    assert "\n" not in refused.value.message
    assert files_in(empty) == []


def test_the_command_names_the_folder_that_is_in_the_way(ran: Ran) -> None:
    (ran.folder / "runs" / "taken").mkdir()
    try:
        done = towline(ran.folder, "replay", "bundle", "--into", "trainer", "--name", "taken")
    finally:
        (ran.folder / "runs" / "taken").rmdir()
    assert done.returncode == 1
    assert done.stderr.startswith("run_exists: ")
    assert len(done.stderr.splitlines()) == 1
