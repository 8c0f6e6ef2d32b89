"""examples/agent as its README says: up, the agent beside it, samples trained from its sessions alone, a clean audit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[3] / "examples" / "agent" / "demo.py"


@pytest.mark.slow
def test_an_openai_client_s_claimed_sessions_train_the_policy(tmp_path: Path, run_name: str) -> None:
    call = [sys.executable, str(DEMO), "--run", run_name, "--steps", "3", "--set", "model.arguments={warm_up_steps = 60}"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=420, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "runs" / run_name / "summary.json").read_text())
    assert summary["samples"]["trained"] == 3 * 8 * 8, "every one of them was claimed: the run has no other lane"
    assert "finished" in done.stdout
    assert "clean" in done.stdout
