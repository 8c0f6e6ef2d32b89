"""The simulator is held against real load tests: what they measure may differ by a tenth, and by no more than their own spread
explains; a model with another time of publishing is called off by the same comparison."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCENARIO = """
[run]
name = "sim"
steps = 24
[sampling]
max_tokens = 400
stop_token_ids = [0]
[buffer]
group_size = 4
groups_per_batch = 6
max_staleness = 1
[rollout]
slots = 4
arguments = { mean_tokens = 60, sigma = 0.5, tokens_per_second = 80 }
[load]
workers = 6
processes = 1
warm_up_seconds = 5
most_seconds = 300
[load.trainer]
step_seconds = 0.3
model_bytes = 65536
"""
BOUND = 0.1


def towline(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "towline.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=folder)


def comparison(folder: Path, *settings: str) -> tuple[int, dict[str, tuple[float, float]]]:
    """The exit status, and of each metric how far off it is and by how much that may be wrong."""
    done = towline("simulate", "s.toml", "--against", "runs", "--json", *settings, folder=folder)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, {metric: (off, answer["margins"][metric]) for metric, _, _, off in answer["checks"]}


@pytest.mark.slow
def test_load_tests_are_foretold_within_a_tenth_and_their_own_noise(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SCENARIO)
    done = towline("loadtest", "s.toml", "-o", "runs", "--repeat", "3", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    _, found = comparison(tmp_path)
    assert len(found) == 5
    for metric, (off, margin) in found.items():
        assert off - margin <= BOUND, f"{metric}: {off:.1%} off +- {margin:.1%}"
    # A version that took a second and a half to publish would hold up a run whose steps take 0.3 s.
    status, found = comparison(tmp_path, "--set", "simulate.publish_seconds=1.5")
    off, margin = found["batches_per_second"]
    assert off - margin > BOUND, f"{off:.1%} off +- {margin:.1%}"
    assert status == 1
