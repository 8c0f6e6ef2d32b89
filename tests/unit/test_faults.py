"""A fault point kills where it's told to, once, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from towline.errors import UsageError
from towline.faults import POINTS, VARIABLE, point

PASS = "from towline.faults import point\nfor _ in range(3): point('worker.generated'); print('passed', flush=True)"


def passes(fault: str) -> tuple[int, int]:
    """How often a process passes the point, and how it ends."""
    done = subprocess.run([sys.executable, "-c", PASS], env=os.environ | {VARIABLE: fault}, capture_output=True, text=True)
    return done.stdout.count("passed"), done.returncode


def test_the_named_point_kills_at_the_named_time(tmp_path):
    assert passes("worker.generated") == (0, -signal.SIGKILL)
    assert passes("worker.generated#3") == (2, -signal.SIGKILL)
    assert passes("worker.task_taken") == (3, 0)


def test_a_mark_makes_it_once_over_all_processes(tmp_path):
    fault = f"reward.taken,worker.generated#2@{tmp_path / 'mark'}"
    assert passes(fault) == (1, -signal.SIGKILL)
    assert (tmp_path / "mark").exists()
    assert passes(fault) == (3, 0)


def test_a_file_tells_a_process_that_runs(tmp_path):
    path = tmp_path / "faults"
    assert passes(f"<{path}") == (3, 0)
    path.write_text("")
    assert passes(f"<{path}") == (3, 0)
    path.write_text("worker.generated#2\n")
    assert passes(f"<{path}") == (1, -signal.SIGKILL)


def test_a_misspelt_point_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "worker.genrated")
    with pytest.raises(UsageError, match="no such point"):
        point("worker.generated")


def test_every_point_is_somewhere_in_the_code():
    root = Path(__file__).parents[2]
    text = "".join(path.read_text() for folder in ("libs", "services") for path in (root / folder).rglob("*.py"))
    for name in POINTS:
        part, _, rest = name.partition(".")
        by_kind = part == "buffer" and (rest.startswith("before_") or rest.endswith("_appended"))
        assert by_kind or f'faults.point("{name}")' in text, name
