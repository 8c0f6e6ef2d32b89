"""The seeded random killer: one long real run whose processes are SIGKILLed one after the other; prints the result as JSON.

`make soak` ends with it (KILLS=1000 SEED=0 STALENESS=1). Exit status 1 where the audit finds anything.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fault.real_run import SERVERS, SERVICES, RealRun, real_run
from towline.contract.entries import OpenEntry, VersionEntry

STEPS = 1_000_000
"""More than any soak comes to: after the last kill the run is stopped, and told to end where it has got to."""
CALM_STEPS = 3
GAP_SECONDS = 6.0
"""At most, between two kills; drawn evenly from 0 on, so that some hit a process at its start and some in its work. The mean
lets a service die less often than the supervisor gives it up for."""
ROUNDS_BETWEEN_PROGRESS = 3
"""Each round kills everybody once; after so many the run must get deeper before the next kill."""


def soak(folder: Path, kills: int, seed: int, max_staleness: int) -> dict[str, Any]:
    """Kill so often, then let the run end."""
    chance = random.Random(seed)
    killed: Counter[str] = Counter()
    began = time.monotonic()
    with real_run(folder, run__steps=str(STEPS), eval__every="50", buffer__max_staleness=str(max_staleness)) as run:
        run.up()
        run.until_depth(1)
        order: list[str] = []
        rounds = 0
        while killed.total() < kills:
            if not order:
                if rounds % ROUNDS_BETWEEN_PROGRESS == 0:
                    depth = run.until_depth(run.until_depth(0) + 1)
                    seconds = time.monotonic() - began
                    print(f"{killed.total()}/{kills} kills, depth {depth}, {seconds:.0f} s", file=sys.stderr, flush=True)
                rounds += 1
                order = chance.sample([*SERVICES, *SERVERS], len(SERVICES) + len(SERVERS))
            name = order.pop()
            run.kill(name)
            killed[name] += 1
            time.sleep(chance.uniform(0.0, GAP_SECONDS))
        depth = run.until_depth(run.until_depth(0) + CALM_STEPS)
        epochs, forks = epochs_and_forks(run)
        run.signal(signal.SIGINT)
        run.wait()
        run.set(run__steps=str(depth + 10 * CALM_STEPS))
        run.up()
        audit = run.assert_ended_well(max_staleness=max_staleness)["audit"]
    return {
        "kills": killed.total(), "killed": dict(sorted(killed.items())), "seed": seed, "max_staleness": max_staleness,
        "epochs": epochs, "forks": forks, "seconds": round(time.monotonic() - began), "audit": audit,
    }  # fmt: skip


def epochs_and_forks(run: RealRun) -> tuple[int, int]:
    """How many trainers opened an epoch, and how many of these began below the head of the one before."""
    epochs = forks = head = 0
    for entry in run.entries():
        if isinstance(entry, OpenEntry):
            epochs += 1
            forks += entry.base != head
            head = entry.base
        elif isinstance(entry, VersionEntry):
            head = entry.number
    return epochs, forks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-staleness", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="towline-soak-") as folder:
        try:
            result = soak(Path(folder), given.kills, given.seed, given.max_staleness)
        except AssertionError as error:
            print(error, file=sys.stderr)
            print(json.dumps({"seed": given.seed, "failed": str(error).partition("\n")[0]}))
            return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
