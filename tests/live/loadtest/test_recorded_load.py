"""A run is recorded; a load test and a simulation of what was recorded have the same lengths, and the same throughput."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ks_2samp

from towline.engine.recording import read_recording

RUN = """
[run]
name = "rec"
steps = {steps}
[sampling]
max_tokens = 400
stop_token_ids = [0]
[buffer]
group_size = 4
groups_per_batch = 6
max_staleness = 1
[rollout]
slots = 4
{rollout}
[load]
workers = 8
processes = 1
warm_up_seconds = 2
most_seconds = 300
{load}
[load.trainer]
step_seconds = 0.5
model_bytes = 65536
"""
DRAWN = "arguments = { mean_tokens = 40, sigma = 0.8, tokens_per_second = 60, transient_failure_rate = 0.03 }"
AGENT = "agent_turns = 2\ntool_seconds = 0.2\ntool_tokens = 20"


def towline(*arguments: str | Path, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "towline.cli.main", *map(str, arguments)], capture_output=True, text=True, timeout=400, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run(folder: Path, name: str, *, steps: int, rollout: str, load: str) -> Path:
    """One load test, kept; its recording."""
    (folder / f"{name}.toml").write_text(RUN.format(steps=steps, rollout=rollout, load=load))
    towline("loadtest", f"{name}.toml", "-o", name, "--keep", folder=folder)
    (directory,) = [path for path in (folder / name).iterdir() if path.is_dir()]
    towline("loadtest", "record", directory / "settings.toml", "--out", f"{name}.json", folder=folder)
    return folder / f"{name}.json"


@pytest.mark.slow
def test_a_recorded_run_is_repeated_by_a_load_test_and_by_the_simulator(tmp_path: Path) -> None:
    first = run(tmp_path, "first", steps=30, rollout=DRAWN, load=AGENT)
    again = run(tmp_path, "again", steps=30, rollout="", load='lengths_from = "first.json"')
    facts: dict[str, Any] = {
        "tokens": lambda one: one.policy_tokens, "turns": lambda one: len(one.turns), "prompt": lambda one: one.prompt,
    }  # fmt: skip
    recorded, drawn = ([one for group in read_recording(str(path)).groups for one in group] for path in (first, again))
    for name, fact in facts.items():
        # Groups are drawn whole, so that the draws of a fact aren't independent.
        assert ks_2samp([fact(one) for one in recorded], [fact(one) for one in drawn]).statistic < 0.15, name
    # The generator's own distribution is another one than, say, twice as long samples would be.
    doubled = [2 * one.policy_tokens for one in recorded]
    assert ks_2samp(doubled, [one.policy_tokens for one in drawn]).statistic > 0.2
    result = "first/result-000.json"
    answer = json.loads(
        towline(
            "simulate", "again.toml", "--calibrate", result, "--against", result, "--within", "0.25", "--json", folder=tmp_path
        )
    )
    off = {metric: far for metric, *_, far in answer["checks"]}
    # The bound of the documents is 10%, of a quiet machine; the time of hops that a busy one takes is in the measured run alone.
    assert off["trained_samples_per_second"] < 0.25, answer["checks"]
