"""One small real run by `towline up`, as a fault test sees it: who runs, how deep the LOG is, how it ended.

Everything is real: the demo's task and a tiny model, a nats-server, an S3 server where no store is named, all services processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from towline.contract.entries import LogEntry
from towline.errors import MissingError, UnavailableError
from towline.local.cleanup import end_leftovers
from towline.local.run_directory import Processes, RunDirectory
from towline.local.servers import NatsServer, S3Server
from towline.store.log import Log
from towline.store.objects import open_store

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
TINY = {
    "buffer.group_size": "4",
    "buffer.groups_per_batch": "4",
    "buffer.max_staleness": "1",
    "eval.every": "12",
    "eval.prompts": "8",
    "model.arguments": "{layers = 1, hidden = 32, warm_up_steps = 5}",
    "publisher.anchor_every": "8",
    "reward.ack_wait_seconds": "4",
    "rollout.ack_wait_seconds": "5",
    "rollout.slots": "32",
    "trainer.checkpoint_every": "2",
}
SERVICES = ("buffer", "rollout_worker", "reward", "trainer", "publisher")
SERVERS = ("nats-server", "s3-server")
LIMIT_SECONDS = 300.0
"""For any one thing to come about: a bound on a hang, not an expectation."""
POLL_SECONDS = 0.03


class RealRun:
    """A run under `folder`/runs/NAME. `up` starts `towline up` and may be called again after it ended."""

    def __init__(self, folder: Path, name: str = "fault", **settings: str) -> None:
        """`settings`: over TINY, `section__key` for section.key."""
        self.directory = RunDirectory(folder / "runs" / name)
        self.process: subprocess.Popen[str] | None = None
        self._folder = folder
        self._name = name
        self._settings = TINY | {key.replace("__", "."): value for key, value in settings.items()}
        self._log: Log | None = None

    def up(self, *, environment: Mapping[str, str] | None = None) -> None:
        assert self.process is None
        arguments = [part for key, value in self._settings.items() for part in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "towline.cli.main", "up", str(DEMO), "--run", self._name, *arguments, "--json"]
        self.process = subprocess.Popen(
            command, cwd=self._folder, env=os.environ | dict(environment or {}), text=True,
            stdout=self._output("out").open("w"), stderr=self._output("err").open("a"), start_new_session=True,
        )  # fmt: skip

    def set(self, **settings: str) -> None:
        """Other settings for the next `up`."""
        self._settings |= {key.replace("__", "."): value for key, value in settings.items()}

    def signal(self, number: signal.Signals) -> None:
        """To `towline up`."""
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        """`towline up`'s exit code, once it ended."""
        assert self.process is not None
        code = self.process.wait(LIMIT_SECONDS)
        self.process = None
        return code

    def answer(self) -> dict[str, Any]:
        """What a `towline up` that ended well printed."""
        answer: dict[str, Any] = json.loads(self._output("out").read_text())
        return answer

    def assert_ended_well(self, *, max_staleness: int = 1) -> dict[str, Any]:
        """Waits for the end: nothing lost, counted twice, too stale or open; nobody left."""
        code = self.wait()
        assert code == 0, self.account()
        answer = self.answer()
        assert answer["audit"]["violations"] == []
        assert answer["audit"]["finished"]
        assert answer["audit"]["staleness_max"] <= max_staleness
        samples = answer["summary"]["samples"]
        assert samples["open"] == 0
        assert samples["admitted"] == samples["trained"] + samples["evaluated"] + sum(samples["dropped"].values())
        size = int(self._settings["buffer.group_size"]) * int(self._settings["buffer.groups_per_batch"])
        assert samples["trained"] == int(self._settings["run.steps"]) * size
        assert self.left() == []
        return answer

    def depth(self) -> int:
        """The LOG's; -1 where it can't be read at this moment."""
        if self._log is None and not self.directory.exists:
            return -1
        try:
            if self._log is None:
                settings = self.directory.load()
                self._log = Log(open_store(settings.store), settings.run.name)
            self._log.refresh()
            return self._log.lineage.depth(self._log.lineage.latest)
        except (UnavailableError, MissingError):
            return -1

    def entries(self) -> list[LogEntry]:
        """The LOG's, as last read."""
        assert self._log is not None
        return self._log.entries()

    def until_depth(self, depth: int) -> int:
        """Waits until the LOG has it; the depth it has."""
        reached = -1

        def far_enough() -> bool:
            nonlocal reached
            reached = self.depth()
            return reached >= depth

        self.until(far_enough, f"depth {depth} was never reached")
        return reached

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert self.process is None or self.process.poll() is None, f"towline up ended before: {what}\n{self.account()}"
            assert time.monotonic() < deadline, f"{what}\n{self.account()}"
            time.sleep(POLL_SECONDS)

    def pid(self, name: str) -> int | None:
        """Of a service's process or a server; None while there is none."""
        if name in SERVERS:
            server = NatsServer(self.directory.path / "nats") if name == "nats-server" else S3Server(self.directory.path / "s3")
            return server.pid
        process = Processes(self.directory).alive().get(name)
        return None if process is None else process.pid

    def kill(self, name: str) -> int:
        """SIGKILL it, waiting for it to be there first; returns the pid."""
        found: list[int] = []

        def there() -> bool:
            pid = self.pid(name)
            if pid is not None:
                found.append(pid)
            return pid is not None

        self.until(there, f"{name} never ran")
        with contextlib.suppress(ProcessLookupError):
            os.kill(found[0], signal.SIGKILL)
        return found[0]

    def left(self) -> list[str]:
        """Command lines of the processes that belong to the run, whoever started them."""
        return [" ".join(process.cmdline()) for process in _alive(str(self.directory.path))]

    def serve(self, service: str, replica: str) -> subprocess.Popen[str]:
        """Another process of a service, started by hand."""
        return subprocess.Popen(
            [sys.executable, "-m", f"towline.{service}", "--config", str(self.directory.settings_path), "--replica", replica],
            cwd=self._folder, env=os.environ | {"PYTHONPATH": str(DEMO.parent), "OMP_NUM_THREADS": "1"}, text=True,
            stdout=self._output(f"{service}-{replica}").open("a"), stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def said(self, service: str, replica: str) -> str:
        """What a process started by `serve` printed."""
        return self._output(f"{service}-{replica}").read_text()

    def events(self) -> str:
        """What `towline up` reported so far."""
        return self._output("err").read_text()

    def account(self) -> str:
        """What happened, for a failed test's message."""
        parts = [f"{path.name}:\n{_tail(path)}" for path in sorted((self.directory.path / "logs").glob("*.log"))]
        return "\n".join([f"up: {_tail(self._output('err'), 60)}", *parts])

    def end(self) -> None:
        """Whatever a failed test left."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.directory.path.is_dir():
            end_leftovers(self.directory)

    def _output(self, name: str) -> Path:
        return self._folder / f"{self._name}.{name}"


@contextlib.contextmanager
def real_run(folder: Path, name: str = "fault", **settings: str) -> Iterator[RealRun]:
    """A run that leaves nothing behind, however the test ends."""
    run = RealRun(folder, name, **settings)
    try:
        yield run
    finally:
        run.end()


def kill_in_turn(run: RealRun, names: Sequence[str], steps: int = 1) -> None:
    """SIGKILL each, once the run went `steps` further than at the last kill."""
    for name in names:
        before = run.depth()
        run.kill(name)
        # A LOG that can't be read now has lost nothing: it goes on from where it was at least.
        run.until_depth(max(before, 0) + steps)


def _alive(path: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["cmdline", "status"]):
        named = any(argument.startswith(path) or argument.endswith(path) for argument in process.info["cmdline"] or [])
        if named and process.info["status"] != psutil.STATUS_ZOMBIE:
            yield process


def _tail(path: Path, lines: int = 12) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.is_file() else ""
