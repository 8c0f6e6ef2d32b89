"""Towline's hop beside other systems' queues: python -m loadtests.queues [FOLDER]; prints a row of Markdown for each.

Needs `pip install -r loadtests/queues/requirements.txt` and a redis-server on PATH (Debian: apt install redis-server). What a
kill -9 of the server leaves: Towline and NATS what was acknowledged; Redis, with its log written before each answer
(appendonly), the same; ZMQ has no server and keeps nothing. After a power loss Redis lacks up to a second (appendfsync
everysec), NATS up to two minutes, unless sync_interval is `always` or three servers hold it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import redis.asyncio
import uvloop
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from towline.config import BusSettings, StoreSettings
from towline.errors import MissingError
from towline.loadtest.scenario import load_scenario
from towline.loadtest.transport import Transport

SYSTEMS = ("towline", "nats", "redis", "zmq")
SCENARIO = Path(__file__).with_name("queues.toml")
PATIENT = Retry(ConstantBackoff(0.05), 200)
"""Ten seconds for the server to start."""


class Queues(Transport):
    """The closed loop over four systems."""

    ends = "loadtests.queues.ends"

    def systems(self, size: int) -> tuple[str, ...]:
        return SYSTEMS

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[tuple[BusSettings, StoreSettings]]:
        folder = self._folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["QUEUES_ZMQ"] = f"ipc://{folder}/zmq"
        os.environ["QUEUES_REDIS"] = f"unix://{folder}/redis"
        program = shutil.which("redis-server")
        if program is None:
            raise MissingError("no redis-server on PATH: apt install redis-server, or correct PATH", code="redis_server")
        server = await asyncio.create_subprocess_exec(
            program, "--port", "0", "--unixsocket", f"{folder}/redis", "--dir", str(folder), "--appendonly", "yes",
            "--appendfsync", "everysec", "--save", "", "--auto-aof-rewrite-percentage", "0", stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with redis.asyncio.from_url(os.environ["QUEUES_REDIS"], retry=PATIENT) as client:
                await client.ping()
            async with super()._served() as served:
                yield served
        finally:
            server.terminate()
            await server.wait()

    async def _clear(self, settings: BusSettings) -> None:
        await super()._clear(settings)
        async with redis.asyncio.from_url(os.environ["QUEUES_REDIS"]) as client:
            await client.delete("queue")


async def main(folder: Path) -> None:
    scenario = load_scenario(SCENARIO)
    run = f"queues-{secrets.token_hex(3)}"
    try:
        result = await Queues(scenario, folder, run, lambda line: print(line, file=sys.stderr, flush=True)).run()
    finally:
        shutil.rmtree(folder / run, ignore_errors=True)
    for size in scenario.load.payload_bytes:
        for name in SYSTEMS:
            rate = result.metrics[f"{name}.{size}.messages_per_second"]
            cpu = result.metrics[f"{name}.{size}.cpu_seconds_per_message"]
            print(f"| {size >> 10} KiB | {name} | {rate:,.0f} | {cpu * 1e6:.0f} us |")


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp")))
