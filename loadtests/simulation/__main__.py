"""The simulator against load tests: python -m loadtests.simulation [--folder F] [--within 0.1] [--seeds 8]; exit 1 beyond it.

Hops' times are taken from one load test (trainer: its slots are free) alone; what is compared are the predictions for all of
them: throughput, goodput, staleness, the trainer's idle share. A prediction is the mean over a few seeds, since a measurement is
one draw of lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import numpy as np

from towline.loadtest.campaign import conduct
from towline.loadtest.result import Result, read_results
from towline.loadtest.scenario import load_scenario
from towline.simulate.outcome import CHECKED, calibrated, check, simulate

HERE = Path(__file__).parent
CALIBRATES = "trainer"
NAMES = (CALIBRATES, "fleet", "tail", "sync")


def measured(folder: Path) -> dict[str, Result]:
    """One load test each, unless the folder has it already."""
    found = {}
    for name in NAMES:
        if not (folder / name).is_dir():
            print(f"load test {name}", file=sys.stderr, flush=True)
            asyncio.run(conduct(load_scenario(HERE / f"{name}.toml"), folder / name, lambda line: print(line, file=sys.stderr)))
        found[name] = read_results(folder / name)[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep the load tests' results here, and use those that are there")
    parser.add_argument("--within", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = measured(given.folder or Path(scratch))
    model = calibrated(results[CALIBRATES])
    print(f"hops, from {CALIBRATES}: {model.model_dump(exclude_defaults=True)}")
    worst = 0.0
    for name, result in results.items():
        scenario = load_scenario(HERE / f"{name}.toml").model_copy(update={"simulate": model})
        runs = [simulate(scenario, seed=seed).metrics for seed in range(given.seeds)]
        mean = {metric: float(np.mean([run[metric] for run in runs])) for metric in CHECKED}
        for one in check(mean, result.metrics):
            print(f"{name:<9} {one.metric:<30} simulated {one.simulated:<9.4g} measured {one.measured:<9.4g} off {one.off:.1%}")
            worst = max(worst, one.off)
    print(f"worst: {worst:.1%}")
    sys.exit(worst > given.within)


if __name__ == "__main__":
    main()
