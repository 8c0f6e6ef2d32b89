"""Towline's hop beside other systems' queues: python -m loadtests.queues [FOLDER]; prints a row of Markdown for each.

Needs `pip install -r loadtests/queues/requirements.txt` and a redis-server on PATH (Debian: apt install redis-server);
`--systems redis,zmq` leaves the others out. What a kill -9 leaves of each is shown by `python -m loadtests.queues.crash`.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
from pathlib import Path

import uvloop
from loadtests.queues.ends import OTHERS
from loadtests.queues.holders import held

from towline.config import BusSettings, StoreSettings
from towline.loadtest.scenario import Scenario, load_scenario
from towline.loadtest.transport import Measured, Say, Transport

OURS = ("towline", "nats")
SCENARIO = Path(__file__).with_name("queues.toml")


class Queues(Transport):
    """The closed loop over several systems; nats-server runs all the time, each other's server while it's measured."""

    ends = "loadtests.queues.ends"

    def __init__(self, scenario: Scenario, folder: Path, run: str, say: Say, others: tuple[str, ...] = tuple(OTHERS)) -> None:
        super().__init__(scenario, folder, run, say)
        self._others = others

    def systems(self, size: int) -> tuple[str, ...]:
        return (*OURS, *self._others)

    async def _measure(
        self, system: str, size: int, messages: int, profile: list[tuple[float, float]], bus: BusSettings, store: StoreSettings
    ) -> Measured:
        async with held(system):
            return await super()._measure(system, size, messages, profile, bus, store)


async def main(folder: Path, others: tuple[str, ...]) -> None:
    scenario = load_scenario(SCENARIO)
    run = f"queues-{secrets.token_hex(3)}"
    queues = Queues(scenario, folder, run, lambda line: print(line, file=sys.stderr, flush=True), others)
    print(f"load average before: {os.getloadavg()[0]:.1f}", file=sys.stderr)
    try:
        result = await queues.run()
    finally:
        shutil.rmtree(folder / run, ignore_errors=True)
    for size in scenario.load.payload_bytes:
        for name in queues.systems(size):
            rate = result.metrics[f"{name}.{size}.messages_per_second"]
            cpu = result.metrics[f"{name}.{size}.cpu_seconds_per_message"]
            print(f"| {size >> 10} KiB | {name} | {rate:,.0f} | {cpu * 1e6:.0f} us |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("/tmp"), help="where the servers' files are put")
    parser.add_argument("--systems", default=",".join(OTHERS), help="beside Towline and nats-py")
    given = parser.parse_args()
    uvloop.run(main(given.folder, tuple(filter(None, given.systems.split(",")))))
