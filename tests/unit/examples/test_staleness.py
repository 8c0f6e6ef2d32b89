"""examples/staleness: which runs there are, that finished ones aren't run again, and that the figure can be drawn."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))
study = pytest.importorskip("examples.staleness.study")
command = pytest.importorskip("examples.staleness.__main__")


def result(cell: Any, steps: int = 12) -> dict[str, Any]:
    speed = 0.05 / (1 + 0.1 * cell.max_staleness)
    return {
        "seed": cell.seed, "max_staleness": cell.max_staleness, "correction": cell.correction, "steps": steps,
        "audit_clean": True,
        "summary": {"wall_seconds": 50.0 + cell.seed}, "held_out": [[0, 0.2], [10, 0.2 + 10 * speed], [12, 0.2 + 12 * speed]],
        "train_reward": [0.2 + speed * depth for depth in range(steps)], "staleness": [float(cell.max_staleness)] * steps,
        "trainer": {"mismatch_kl": [0.01 * cell.max_staleness] * steps},
    }  # fmt: skip


def test_the_grid_is_every_bound_with_and_without_correction_a_seed_at_a_time() -> None:
    cells = study.grid(range(2))
    assert len(cells) == len({cell.name for cell in cells}) == 20
    assert {(cell.max_staleness, cell.correction) for cell in cells[:10]} == {
        (bound, correction) for bound in (0, 1, 2, 4, 8) for correction in ("none", "tis")
    }
    assert {cell.seed for cell in cells[:10]} == {0}


def test_a_run_changes_what_is_studied_and_nothing_else() -> None:
    words = study.Cell(1, 4, "tis").command(50, "runs")
    changed = dict(word.split("=", 1) for flag, word in itertools.pairwise(words) if flag == "--set")
    assert changed == {
        "run.name": '"staleness-4-tis-1"', "run.seed": "1", "run.steps": "50", "run.directory": '"runs"',
        "buffer.max_staleness": "4", "trainer.correction": '"tis"', "eval.every": "10",
    }  # fmt: skip


def test_the_study_goes_on_where_it_was_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def run(cell: Any, steps: int, directory: str) -> dict[str, Any]:
        done.append(cell.name)
        return result(cell)

    monkeypatch.setattr(command, "run", run)
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(command, "HERE", tmp_path / "here")
    pytest.importorskip("matplotlib")
    command.main(seeds=1, steps=12, limit=3, directory=str(tmp_path))
    assert len(done) == 3
    assert not list((tmp_path / "here").iterdir())
    command.main(seeds=1, steps=12, limit=100, directory=str(tmp_path))
    assert len(done) == len(set(done)) == 10
    assert (tmp_path / "here" / "staleness.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "staleness" / "results.json").read_text())) == 10


def test_the_table_says_what_the_results_say() -> None:
    cells = study.grid(range(1))
    lines = command.table(cells, {cell.name: result(cell) for cell in cells})
    assert len(lines) == 12
    assert lines[2] == "| 0 | none | 0.00 | 0.0000 | 0.750 | 10 | 50 |"
    assert command.batches_to({"held_out": [[0, 0.2], [10, 0.6], [20, 0.8]]}, 0.7) == 15
    assert command.batches_to({"held_out": [[0, 0.2], [10, 0.6]]}, 0.7) is None
