"""The runs of the study: which there are, how one is run, and what is kept of it.

Every run is `towline up` on the demo's TOML file with a few settings changed; what is kept is read from the run's two logs, so a
run that a killed study left behind goes on where it was, and a finished one is never run again.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from towline.local.access import open_run
from towline.local.run_directory import directory_of, find_run
from towline.local.summary import read_control
from towline.store.log import Log

DEMO = Path(__file__).parent.parent / "demo.toml"
STALENESS = (0, 1, 2, 4, 8)
CORRECTIONS = ("none", "tis")


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One run of the grid."""

    seed: int
    max_staleness: int
    correction: str

    @property
    def name(self) -> str:
        return f"staleness-{self.max_staleness}-{self.correction}-{self.seed}"

    def command(self, steps: int, directory: str) -> list[str]:
        """`towline up` for this run: the demo's task and losses, only what is studied changed."""
        changes = {
            "run.name": self.name,
            "run.seed": self.seed,
            "run.steps": steps,
            "run.directory": directory,
            "buffer.max_staleness": self.max_staleness,
            "trainer.correction": self.correction,
            "eval.every": 10,
        }
        towline = Path(sys.executable).with_name("towline")
        options = [part for key, value in changes.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        return [str(towline), "up", str(DEMO), "--json", *options]


def grid(seeds: Iterable[int]) -> list[Cell]:
    """Every run, a seed's all before the next seed's, so that a study that is cut short has whole seeds."""
    return [Cell(seed, bound, correction) for seed in seeds for correction in CORRECTIONS for bound in STALENESS]


def missing(cells: Iterable[Cell], results: dict[str, Any]) -> list[Cell]:
    """Those that no result stands of."""
    return [cell for cell in cells if cell.name not in results]


def run(cell: Cell, steps: int, directory: str) -> dict[str, Any]:
    """The finished run's result. Raises `CalledProcessError` where the run or its audit fails; its own words are on stderr."""
    found = subprocess.run(cell.command(steps, directory), check=True, stdout=subprocess.PIPE, text=True)
    answer = json.loads(found.stdout.strip().splitlines()[-1])
    return {
        "seed": cell.seed,
        "max_staleness": cell.max_staleness,
        "correction": cell.correction,
        "steps": steps,
        "audit_clean": not answer["audit"]["violations"],
        "summary": answer["summary"],
        **asyncio.run(_curves(str(Path(directory, cell.name)))),
    }


async def _curves(target: str) -> dict[str, Any]:
    """From CONTROL, by depth: held-out reward, the batches' mean reward and staleness; from the trainer's log, its figures."""
    directory, settings = find_run(target)
    async with open_run(directory, settings) as access:
        log = Log(access.objects, settings.run.name)
        await asyncio.to_thread(log.refresh)
        control = await read_control(access.bus)
    batches = control.lineage_batches(log.lineage)
    evals = sorted((record.depth, record.mean) for record in control.evals.values() if record.mean is not None)
    return {
        "held_out": [[depth, mean] for depth, mean in evals],
        "train_reward": [round(float(np.mean([row.reward for row in batch.rows])), 5) for batch in batches],
        "staleness": [round(float(np.mean([batch.for_depth - row.least_depth for row in batch.rows])), 4) for batch in batches],
        "trainer": _trainer_log(directory_of(settings).log_path("trainer")),
    }


def _trainer_log(path: Path) -> dict[str, list[float]]:
    """The mismatch of engine and trainer at each step, as the trainer logged it; later lines win where a step was done again."""
    found: dict[int, float] = {}
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and record.get("event") == "trained":
            found[int(record["depth"])] = float(record["mismatch_kl"])
    return {"mismatch_kl": [round(value, 6) for _, value in sorted(found.items())]}
