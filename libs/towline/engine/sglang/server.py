"""An SGLang server as a child process: its log, and its end with ours."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import psutil

from towline.engine.sglang.command import HOST, ServerPlan, command_line, environment_of
from towline.errors import EngineError

_STOP_SECONDS = 5.0
_GONE_POLL_SECONDS = 0.05
_LOG_TAIL_BYTES = 20_000


class ServerProcess:
    """One started server. `log` collects what it prints."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self.port, self.log = port, log
        self._process = process

    @classmethod
    async def start(cls, plan: ServerPlan, model: Path, label: str, *, log: Path, command_file: Path) -> ServerProcess:
        port = _free_port()
        with open(log, "ab") as output:  # noqa: ASYNC230  (a local file, once a start)
            process = await asyncio.create_subprocess_exec(
                *command_line(plan, model, label, port), stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                env=environment_of(plan, command_file), start_new_session=True,
            )  # fmt: skip
        return cls(process, port, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        return await self._process.wait()

    async def end(self) -> None:
        """SIGTERM, then SIGKILL to all of its processes; returns when it is gone."""
        if self.alive:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._process.wait()
        # The group may outlive its leader, and its schedulers hold the accelerator's memory, which the next server needs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await asyncio.to_thread(_wait_until_gone, self._process.pid)

    def failure(self, what: str) -> EngineError:
        """The error for a server that `what` happened to, with the last line of its log that names an error."""
        return EngineError(f"the SGLang server {what}: {_last_error(self.log)} (log: {self.log})", code="engine_server")


def _wait_until_gone(group: int) -> None:
    """Blocks, for _STOP_SECONDS at most."""
    until = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < until and runs(group):
        time.sleep(_GONE_POLL_SECONDS)


def runs(group: int) -> bool:
    """Whether a process of the group is left; one that is only waiting to be reaped isn't."""
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False


def _last_error(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "error:" in line or "Exception" in line]
    return (named or lines or ["it printed nothing"])[-1][:300]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
