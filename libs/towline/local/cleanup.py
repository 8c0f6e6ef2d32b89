"""Ends everything that a run left on this machine: after `towline down`, or when `towline up` itself was killed.

As a program (`python -m towline.local.cleanup DIRECTORY`) it waits for the end of its standard input, a pipe that
`towline up` holds open: the kernel closes it however `up` ends, SIGKILL included.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from towline.local.daemon import Daemon
from towline.local.run_directory import Processes, RunDirectory
from towline.local.services import STOP_ORDER
from towline.local.supervisor import SERVERS_SECONDS, SERVICES_SECONDS, STAGE_SECONDS

UP = "up"
UP_SECONDS = 15.0
KILL_SECONDS = 2.0
_POLL_SECONDS = 0.02
CLEAN = b"clean"
"""What `towline up` says when nothing is left to clean up."""


def start_guard(directory: RunDirectory) -> subprocess.Popen[bytes]:
    """The process that cleans up after `towline up`. Write CLEAN into its stdin and close that at a clean end."""
    log = directory.log_path("cleanup")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "towline.local.cleanup", str(directory.path)],
            stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip


def end_run(directory: RunDirectory) -> list[str]:
    """Stop `towline up` if it runs (it stops the rest in order), then whatever is left; the names of what ran."""
    processes = Processes(directory)
    ended = []
    up = processes.alive().get(UP)
    if up is not None:
        ended.append(UP)
        _terminate([up], UP_SECONDS)
    ended += end_leftovers(directory)
    return ended


def end_leftovers(directory: RunDirectory) -> list[str]:
    """Stop the run's services, in order, then its servers; the names of what ran."""
    services = _services(directory)
    deadline = time.monotonic() + SERVICES_SECONDS
    for kind in STOP_ORDER:
        group = [process for name, process in services.items() if name.partition("-")[0] == kind]
        for process in group:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        _wait_ended(group, min(STAGE_SECONDS, deadline - time.monotonic()))
    _terminate(list(services.values()), max(deadline - time.monotonic(), 0.0))
    servers: list[Daemon] = [server for server in (directory.nats(), directory.s3()) if server.pid is not None]
    for server in servers:
        server.stop_seconds = SERVERS_SECONDS
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda server: server.stop(), servers))
    for name in services:
        Processes(directory).forget(name)
    return [*services, *[server.name for server in servers]]


def _services(directory: RunDirectory) -> dict[str, psutil.Process]:
    """The run's processes by name: those on record, and any other that was started with its settings file (its start may
    not have been recorded yet when `up` was killed)."""
    found = Processes(directory).alive()
    found.pop(UP, None)
    known = {process.pid for process in found.values()} | {os.getpid()}
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if process.pid in known or str(directory.settings_path) not in command or "-m" not in command[:-1]:
            continue
        module = command[command.index("-m") + 1]
        found[f"{module.rpartition('.')[2]}-{process.pid}"] = process
    return found


def _terminate(processes: list[psutil.Process], seconds: float) -> None:
    """SIGTERM, and SIGKILL for what is left after `seconds`."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    for process in _wait_ended(processes, seconds):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_ended(processes, KILL_SECONDS)


def _wait_ended(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait at most so long; those that still run. A zombie has ended, whether or not its parent cares."""
    deadline = time.monotonic() + seconds
    while left := [process for process in processes if _runs(process)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_SECONDS)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def main() -> None:
    directory = RunDirectory(Path(sys.argv[1]))
    if sys.stdin.buffer.read() == CLEAN:
        return
    print(
        f"towline up ended without cleaning up; ended {', '.join(end_leftovers(directory)) or 'nothing, all was gone'}",
        flush=True,
    )


if __name__ == "__main__":
    main()
