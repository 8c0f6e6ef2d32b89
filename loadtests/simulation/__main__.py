"""The simulator against load tests: python -m loadtests.simulation [--folder F] [--within 0.1] [--repeat 3]; exit 1 beyond it.

Hops' times are taken from one load test (trainer's first: its slots are free) alone; what is compared are the predictions for
all of them: throughput, goodput, staleness, the trainer's idle share. Each scenario is run with `--repeat` seeds, and each of
these runs is compared with the simulation of its seed; what is left between them says how sure a figure is.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

from towline.loadtest.campaign import conduct
from towline.loadtest.result import Result, read_results
from towline.loadtest.scenario import load_scenario
from towline.simulate.comparison import against
from towline.simulate.outcome import calibrated

HERE = Path(__file__).parent
CALIBRATES = "trainer"
SCENARIOS = {name: HERE / f"{name}.toml" for name in (CALIBRATES, "fleet", "tail", "sync")} | {
    "short": HERE.parent / "short.toml"
}


def measured(name: str, seed: int, folder: Path) -> Result:
    """A load test, unless the folder has it already."""
    target = folder / f"{name}-{seed}"
    if not list(target.glob("result-*.json")):
        print(f"load test {name}, seed {seed}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        scenario = load_scenario(SCENARIOS[name], {"run.seed": seed})
        asyncio.run(conduct(scenario, target, lambda line: print(line, file=sys.stderr)))
    return read_results(target)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep the load tests' results here, and use those that are there")
    parser.add_argument("--within", type=float, default=0.1)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each scenario, seeds 1, 2, …")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        results = {name: [measured(name, seed + 1, folder) for seed in range(given.repeat)] for name in SCENARIOS}
    worst, unsure = 0.0, 0
    for name, found in results.items():
        scenario = load_scenario(SCENARIOS[name])
        model = calibrated(results[CALIBRATES][0], scenario.simulate)
        if name == CALIBRATES:
            print(f"hops, from {name}, seed 1: {model.model_dump(exclude_defaults=True)}")
        loads = ", ".join(f"{one.machine['load_average_before']:.1f}" for one in found)
        print(f"{name}, load before the runs {loads}")
        for one in against(scenario.model_copy(update={"simulate": model}), found)[0]:
            figures = f"simulated {one.simulated:<8.4g} measured {one.measured:<8.4g} off {one.off:.1%} +- {one.margin:.1%}"
            print(f"  {one.metric:<28} {figures}")
            worst, unsure = max(worst, one.off), unsure + (one.verdict(given.within) == "unsure")
    print(f"worst: {worst:.1%}; {unsure} figures may be beyond {given.within:.0%} or within it, by their margins")
    sys.exit(worst > given.within)


if __name__ == "__main__":
    main()
