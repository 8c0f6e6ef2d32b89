"""`python -m examples.staleness`: every run of the study that is missing, then the table and the figure."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from examples.staleness.plot import draw, held_out_end
from examples.staleness.study import Cell, grid, missing, run

HERE = Path(__file__).parent


def main(
    seeds: Annotated[int, typer.Option(help="Seeds 0 to N - 1: each is ten runs of about a minute on two cores.")] = 1,
    steps: Annotated[int, typer.Option(help="Batches a run.")] = 80,
    limit: Annotated[int, typer.Option(help="At most so many runs now; the next call goes on.")] = 1_000,
    directory: Annotated[str, typer.Option(help="Where the runs lie.")] = "runs",
) -> None:
    """Reward against max_staleness, with and without correction, on the demo's task."""
    path = Path(directory, "staleness", "results.json")
    results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    cells = grid(range(seeds))
    left = missing(cells, results)
    for number, cell in enumerate(left[:limit]):
        typer.echo(f"{cell.name}: {number + 1} of {len(left)} missing runs")
        results[cell.name] = run(cell, steps, directory)
        _write(path, results)
    wanted = {cell.name: results[cell.name] for cell in cells if cell.name in results}
    for line in table(cells, wanted):
        typer.echo(line)
    if wanted:
        draw(wanted, path.with_name("staleness.png"))
        typer.echo(f"figure: {path.with_name('staleness.png')}")
    if missing(cells, results):
        typer.echo(f"{len(missing(cells, results))} runs are missing; the same command goes on")
        return
    shutil.copyfile(path.with_name("staleness.png"), HERE / "staleness.png")
    _write(HERE / "results.json", wanted)
    typer.echo(f"the study is whole: figure and results are in {HERE}")


def table(cells: list[Cell], results: dict[str, Any]) -> list[str]:
    """The README's table, in Markdown."""
    lines = [
        "| max_staleness | correction | staleness, mean | mismatch KL | held-out reward | batches to 0.7 | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for bound, correction in sorted({(cell.max_staleness, cell.correction) for cell in cells}):
        found = [r for r in results.values() if (r["max_staleness"], r["correction"]) == (bound, correction)]
        if not found:
            continue
        rewards = ", ".join(f"{held_out_end(result):.3f}" for result in found)
        reached = ", ".join(str(batches_to(result, 0.7) or "never") for result in found)
        lines.append(
            f"| {bound} | {correction} | {_mean(found, lambda r: np.mean(r['staleness'])):.2f} "
            f"| {_mean(found, lambda r: np.mean(r['trainer']['mismatch_kl'])):.4f} | {rewards} | {reached} "
            f"| {_mean(found, lambda r: r['summary']['wall_seconds']):.0f} |"
        )
    return lines


def batches_to(result: dict[str, Any], reward: float) -> int | None:
    """The batches after which the held-out reward first is that, on the line between two evaluations."""
    points = result["held_out"]
    for (before, low), (after, high) in itertools.pairwise(points):
        if low < reward <= high:
            return int(before + (after - before) * (reward - low) / (high - low) + 0.5)
    return None


def _mean(found: list[dict[str, Any]], value: Any) -> float:
    return float(np.mean([value(result) for result in found]))


def _write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(
        "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(results[name])}" for name in sorted(results)) + "\n}\n"
    )
    scratch.rename(path)


if __name__ == "__main__":
    typer.run(main)
