"""One real run of the demo for all tests here: every service a process, one group whose samples can't be scored."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from live.trainer.conftest import make_settings, model_folder, own_scratch  # noqa: F401 — fixtures
from support.bundles import towline
from towline.local.run_directory import RunDirectory

DEMO = Path(__file__).parents[3] / "examples"
UNSCORED_GROUP = 9
"""The eval groups of version 0 are numbered 0 to 7, the training groups follow."""
PICKY = f"""
from sort_digits import reward as sorted_reward


def reward(sample):
    if sample.group == {UNSCORED_GROUP}:
        raise RuntimeError("no answer sheet")
    return sorted_reward(sample)


def halved(sample):
    return sorted_reward(sample).value / 2


def ranked(samples):
    return [float(sample.sample) for sample in samples]
"""
SETTINGS = {
    "eval.prompts": "8", "eval.every": "4", "buffer.groups_per_batch": "4", "trainer.checkpoint_every": "1",
    "model.arguments": "{layers = 1, hidden = 32, warm_up_steps = 5}", "reward.function": "picky:reward",
    "reward.max_attempts": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """A finished run in `folder`/runs/small, its code in `code`, and its bundle."""

    folder: Path
    code: Path
    bundle: Path
    checkpoint: int
    """A version in the middle whose checkpoint is in the bundle."""


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("ran")
    code = folder / "code"
    shutil.copytree(DEMO, code, ignore=shutil.ignore_patterns("__pycache__"))
    (code / "picky.py").write_text(PICKY)
    command = [sys.executable, "-m", "towline.cli.main", "up", str(code / "demo.toml"), "--run", "small", "--steps", "6"]
    command += ["--store", (folder / "store").as_uri()]
    command += [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        if RunDirectory(folder / "runs" / "small").exists:
            towline(folder, "down", "small")
    versions = json.loads(towline(folder, "versions", "list", "small", "--json").stdout)
    middle = versions[len(versions) // 2]["version"]
    done = towline(folder, "trajectories", "export", "small", "-o", "bundle", "--checkpoint", str(middle), "--parquet")
    assert done.returncode == 0, done.stderr
    return Ran(folder, code, folder / "bundle", middle)
