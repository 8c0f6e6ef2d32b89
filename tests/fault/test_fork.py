"""A version of a run becomes a run of its own, and the run it comes from doesn't notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fault.real_run import DEMO, RealRun, real_run
from towline.config import load_settings
from towline.contract.entries import BaseEntry, VersionEntry
from towline.local.access import open_objects
from towline.local.run_directory import RunDirectory
from towline.store.log import Log
from towline.store.objects import open_store

VERSION_DEPTH = 2


def towline(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "towline.cli.main", *arguments]
    environment = os.environ | {"PYTHONPATH": str(DEMO.parent)}
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=300, check=False)


def stored(run: RealRun) -> dict[str, int]:
    """Every object of the run, with its size."""
    with open_objects(run.directory, run.directory.load()) as objects:
        return {info.key: info.size for info in objects.list(f"{run.directory.name}/")}


@pytest.mark.parametrize("own_store", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["shared-store", "own-store"])
def test_a_version_becomes_a_run_of_its_own(tmp_path, own_store):
    store = {} if own_store else {"store__url": (tmp_path / "store").as_uri()}
    with real_run(tmp_path, "parent", run__steps="4", eval__every="0", **store) as run:
        run.up()
        run.assert_ended_well()
        before = stored(run)
        with open_objects(run.directory, run.directory.load()) as objects:
            log = Log(objects, "parent")
            log.refresh()
            version = log.lineage.version_at_depth(VERSION_DEPTH)
            wanted = log.version(version)
        for arguments, code in (
            (["--from", "99"], "version_missing"),
            (["--from", "x"], "version_missing"),
            (["--from", "latest", "--name", "No Name"], "config"),
            (["--from", "latest", "--set", "no.key=1"], "override"),
            (["--from", "latest", "--out", "nowhere/x.toml"], "output"),
        ):
            refused = towline(tmp_path, "run", "fork", "parent", "-o", "x.toml", *arguments)
            assert refused.returncode in (1, 2)
            assert refused.stderr.startswith(f"{code}: "), refused.stderr
            assert len(refused.stderr.splitlines()) == 1
        assert not (tmp_path / "x.toml").exists()
        other = tmp_path / "other.toml"
        arguments = ["--from", "latest", "--name", "other", "--config", str(DEMO), "-o", str(other)]
        sets = ["--set", f"store.url={(tmp_path / 'elsewhere').as_uri()}"]
        made = towline(tmp_path, "run", "fork", "parent", *arguments, *sets)
        assert made.returncode == 0, made.stderr
        assert f"its settings are in {other}" in made.stdout
        settings = load_settings(other)
        assert (settings.run.name, settings.run.steps) == ("other", load_settings(DEMO).run.steps)
        assert (Path(settings.model.source) / "config.json").is_file()
        log = Log(open_store(settings.store), "other")
        log.refresh()
        assert isinstance(log.entry(0), BaseEntry)

        toml = tmp_path / "child.toml"
        given = ["run", "fork", "parent", "--from", str(version), "--name", "child", "--set", "run.steps=3", "-o", str(toml)]
        made = towline(tmp_path, *given, "--json")
        assert made.returncode == 0, made.stderr
        assert json.loads(made.stdout)["from"] == f"parent@{version}"
        again = towline(tmp_path, *given)
        assert again.returncode == 1
        assert again.stderr.startswith("run_exists: ")

        up = towline(tmp_path, "up", str(toml), "--json")
        assert up.returncode == 0, up.stderr
        assert json.loads(up.stdout)["audit"]["depth"] == 3
        child = RunDirectory(tmp_path / "runs" / "child")
        with open_objects(child, child.load()) as objects:
            log = Log(objects, "child")
            log.refresh()
            base = log.entry(0)
        assert isinstance(base, BaseEntry)
        assert isinstance(wanted, VersionEntry)
        assert (base.source, base.model_digest) == (f"parent@{version}", wanted.model_digest)
        assert stored(run) == before
