"""What holds a system's messages while they are under way: started for one measurement, killed for real, brought back.

Each tells the ends its address by an environment variable. Folders are short: the paths of sockets have a limit.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from towline.errors import MissingError, UnavailableError

START_SECONDS = 120.0
"""Ray's several processes take long on a busy machine."""


class Holder:
    """Nothing that stands between the ends: ZMQ's two sockets, or a server that someone else runs."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def kill(self) -> str:
        """SIGKILL to the processes that hold messages; what they were."""
        return ""

    async def restart(self) -> str:
        """As an operator, or the system itself, would after that; what was done."""
        return ""


class RedisHolder(Holder):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        import redis.asyncio
        from redis.asyncio.retry import Retry
        from redis.backoff import ConstantBackoff

        folder, program = self._folder, shutil.which("redis-server")
        if program is None:
            raise MissingError("no redis-server on PATH: apt install redis-server, or correct PATH", code="redis_server")
        os.environ["QUEUES_REDIS"] = f"unix://{folder}/redis"
        self._server = await asyncio.create_subprocess_exec(
            program, "--port", "0", "--unixsocket", f"{folder}/redis", "--dir", str(folder), "--appendonly", "yes",
            "--appendfsync", "everysec", "--save", "", "--auto-aof-rewrite-percentage", "0", stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        patient = Retry(ConstantBackoff(0.05), 200)
        async with redis.asyncio.from_url(os.environ["QUEUES_REDIS"], retry=patient) as client:
            await client.ping()

    async def stop(self) -> None:
        if self._server is not None and self._server.returncode is None:
            self._server.terminate()
            await self._server.wait()

    async def kill(self) -> str:
        assert self._server is not None
        self._server.kill()
        await self._server.wait()
        return "redis-server"

    async def restart(self) -> str:
        await self.start()
        return "redis-server started on its log"


class RayHolder(Holder):
    """A Ray cluster of one node in a process of its own, with the queue's actor, or TransferQueue's, on it."""

    def __init__(self, what: str, folder: Path) -> None:
        self._what, self._folder = what, folder
        self._process: asyncio.subprocess.Process | None = None
        self._told: dict[str, Any] = {}

    async def start(self) -> None:
        # A secret of this cluster's own: else Ray writes one into the home folder.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "loadtests.queues.ray_cluster", self._what, str(self._folder),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            line = await self._process.stdout.readline()
        if not line:
            raise UnavailableError("Ray didn't start; it said why above", code="ray")
        self._told = json.loads(line)
        os.environ["QUEUES_RAY"] = self._told["address"]

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            await self._process.wait()

    async def kill(self) -> str:
        for pid in self._told["pids"]:
            os.kill(pid, signal.SIGKILL)
        return self._told["holders"]

    async def restart(self) -> str:
        return self._told["restart"]


def holder_of(system: str, folder: Path) -> Holder:
    if system == "redis":
        return RedisHolder(folder)
    if system == "zmq":
        os.environ["QUEUES_ZMQ"] = f"ipc://{folder}/zmq"
    return RayHolder(system, folder) if system in ("ray", "transferqueue") else Holder()


@asynccontextmanager
async def held(system: str) -> AsyncIterator[Holder]:
    """Its holder, running; gone with all that it held afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="q"))
    holder = holder_of(system, folder)
    try:
        await holder.start()
        yield holder
    finally:
        await holder.stop()
        shutil.rmtree(folder, ignore_errors=True)
