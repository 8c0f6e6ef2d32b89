"""One process of the benchmark: python -m loadtests.views.process PART CONFIG ENDPOINT."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from pathlib import Path

import uvloop
from loadtests.views.part import Part
from loadtests.views.parts import Buffer, Rollouts
from loadtests.views.watching import Readers, Screens, Web

from towline.bus.client import Bus
from towline.config import load_settings
from towline.store.blobs import Blobs
from towline.store.objects import open_store

PARTS: Mapping[str, type[Part]] = {"buffer": Buffer, "rollouts": Rollouts, "screens": Screens, "web": Web, "readers": Readers}


async def run_part(name: str, config: Path, endpoint: str) -> None:
    settings = load_settings(config)
    objects = open_store(settings.store)
    run = settings.run.name
    bus = await Bus.connect(settings.bus, run=run, client_name=f"bench-{name}", blobs=Blobs(objects, run))
    part = PARTS[name](settings, bus, objects, endpoint)
    work = asyncio.create_task(part.work())
    obey = asyncio.create_task(part.obey())
    done, left = await asyncio.wait([work, obey], return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    for task in done:
        task.result()
    await bus.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("config", type=Path)
    parser.add_argument("endpoint")
    parser.add_argument("--rate", type=float, default=Rollouts.rate)
    parser.add_argument("--trace-seconds", type=float, default=Readers.trace_seconds)
    given = parser.parse_args()
    Rollouts.rate, Readers.trace_seconds = given.rate, given.trace_seconds
    uvloop.run(run_part(given.part, given.config, given.endpoint))
