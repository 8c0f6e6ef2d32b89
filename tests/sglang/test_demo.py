"""`towline up --engine sglang`: the demo's loop with a real SGLang server in its worker, as processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang
DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
STEPS = 25
LIMIT_SECONDS = 570.0


def towline(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "towline.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)


@pytest.fixture
def ended(tmp_path: Path) -> Iterator[None]:
    """Whatever a failed run left is ended."""
    yield
    towline(tmp_path, "down", "sg")


@pytest.mark.usefixtures("ended")
def test_the_demos_held_out_reward_rises_with_sglang(tmp_path: Path) -> None:
    done = towline(
        tmp_path, "up", str(DEMO), "--engine", "sglang", "--run", "sg", "--steps", str(STEPS), "--json",
        "--store", (tmp_path / "store").as_uri(), "--set", "buffer.groups_per_batch=32", "--set", f"eval.every={STEPS}",
        "--set", "trainer.warmup_steps=5",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["audit"]["clean"]
    summary = answer["summary"]
    assert summary["samples"]["trained"] == STEPS * 32 * 8
    # The means over 256 held-out prompts have a standard error of about 0.02 each.
    assert summary["reward_last"] - summary["reward_first"] > 0.1
    newest = json.loads(towline(tmp_path, "trajectories", "list", "sg", "--last", "1", "--json").stdout)
    shown = towline(tmp_path, "trajectories", "show", "sg", f"{newest['group']}.{newest['sample']}", "--json").stdout
    assert json.loads(shown)["engine"] == "sglang"
