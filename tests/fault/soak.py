"""The seeded random killer: real runs whose processes are SIGKILLed one after the other; prints the result as JSON.

`make soak` ends with it (KILLS=1000 SEED=0). One run takes RUN_KILLS of them and then goes on to its end; the next has another
seed and other settings. Exit status 1 where an audit finds anything: lost, counted twice, or over the bound.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fault.field import FAULTY, FAULTY_GROUPS, Field, Zygote, field
from towline.faults import POINTS

STEPS = 1_000_000
"""More than any run comes to: after its last kill it's told to end where it has got to."""
CALM_STEPS = 3
RUN_KILLS = 150
"""A run's log grows with its steps, and every restart reads it whole."""
AUDIT_KILLS = 50
"""Kills between two audits of the live run."""
GAP_SECONDS = 1.5
"""At most, between two strikes; drawn evenly from 0 on, so that some hit a process at its start and some in its work."""
POINT_SHARE = 0.3
"""Of the strikes: somebody dies at a fault point drawn at random, the others at a moment drawn at random."""
POINT_SECONDS = 2.0
"""How long a drawn point may not be reached before the next strike."""
TOGETHER = (1, 1, 1, 2, 3)
"""How many are killed in the same moment; one is drawn."""
PROGRESS_KILLS = 15
"""After so many the run must get deeper before the next strike."""


def soak(
    zygote: Zygote,
    folder: Path,
    kills: int,
    seed: int,
    max_staleness: int,
    seconds: float = float("inf"),
    *,
    keep_history: bool = True,
) -> dict[str, Any]:
    """Kill so often, or for so long, then let the run end."""
    chance = random.Random(seed)
    began = time.monotonic()
    points: Counter[str] = Counter()
    task = FAULTY if seed % 2 == 0 else FAULTY_GROUPS
    settings = {
        "run__steps": STEPS, "eval__every": 25, "buffer__max_staleness": max_staleness, "buffer__keep_history": keep_history,
        "buffer__snapshot_every_records": 200 if keep_history else 40,
    }  # fmt: skip
    with field(zygote, folder, s3=True, **settings, **task) as run:
        run.until_depth(1)
        audits, deeper = AUDIT_KILLS, 0
        while (killed := run.kills.total()) < kills and time.monotonic() - began < seconds:
            if killed >= deeper:
                deeper = killed + PROGRESS_KILLS
                depth = run.until_depth(run.until_depth(0) + 1)
                print(f"{killed}/{kills} kills, depth {depth}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            if killed >= audits:
                audits = killed + AUDIT_KILLS
                run.audited()
            if chance.random() < POINT_SHARE:
                points.update(strike_at(run, chance))
            else:
                for name in chance.sample(run.names, chance.choice(TOGETHER)):
                    run.kill(name)
            time.sleep(chance.uniform(0.0, GAP_SECONDS))
        depth = run.until_depth(run.until_depth(0) + 1)
        killed = run.kills.total()
        run.end_after(depth + CALM_STEPS)
        report = run.assert_ended_well()
        epochs, forks = run.epochs_and_forks()
        return {
            "kills": killed, "killed": dict(sorted(run.kills.items())), "at_points": dict(sorted(points.items())),
            "ended_by_a_fault": {end: count for end, count in sorted(run.exits.items()) if not end.endswith(":0")},
            "seed": seed, "max_staleness": max_staleness, "keep_history": keep_history, "epochs": epochs, "forks": forks,
            "seconds": round(time.monotonic() - began), "audit": report.as_dict(),
        }  # fmt: skip


def strike_at(run: Field, chance: random.Random) -> set[str]:
    """Somebody dies at a point that is reached soon; the point, or none."""
    run.die_at([f"{chance.choice(list(POINTS))}#{chance.randint(1, 3)}" for _ in range(3)])
    until = time.monotonic() + POINT_SECONDS
    while not run.died_at() and time.monotonic() < until:
        time.sleep(0.02)
    died = run.died_at()
    run.die_at([])
    return {name.partition("#")[0] for name in died}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new run after so long, and the last one ends")
    parser.add_argument("--max-staleness", type=int, help="0, 1 and 2 in turn where it's left out")
    parser.add_argument("--purged", action="store_true", help="purge each run's history; every fourth's where it's left out")
    given = parser.parse_args()
    total = runs = 0
    began = time.monotonic()
    zygote = Zygote()
    try:
        while total < given.kills and (left := given.seconds - (time.monotonic() - began)) > 0:
            seed = given.seed + runs
            staleness = (1, 0, 2)[seed % 3] if given.max_staleness is None else given.max_staleness
            with tempfile.TemporaryDirectory(prefix="towline-soak-", ignore_cleanup_errors=True) as folder:
                try:
                    result = soak(
                        zygote, Path(folder), min(RUN_KILLS, given.kills - total), seed, staleness, left,
                        keep_history=given.purged is False and seed % 4 != 3,
                    )  # fmt: skip
                except AssertionError as error:
                    print(error, file=sys.stderr)
                    print(json.dumps({"seed": seed, "max_staleness": staleness, "failed": str(error).partition("\n")[0]}))
                    return 1
            print(json.dumps(result), flush=True)
            total += result["kills"]
            runs += 1
    finally:
        zygote.close()
    print(json.dumps({"runs": runs, "kills": total, "violations": 0}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
