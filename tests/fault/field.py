"""A field for many kills: one run whose processes start again at once, wherever and whenever they are killed.

Everything is real (services as processes of their own, a nats-server, an S3 server), but what a kill costs is small: services
are forked with their imports done (zygote.py), start again without a delay, and the bus waits only seconds for a dead one's acks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fault.real_run import DEMO, SERVERS, SERVICES
from support.servers import running
from towline.audit.report import AuditReport
from towline.audit.run import audit
from towline.buffer.replay import read_outcomes, rebuild
from towline.buffer.state import State
from towline.bus.client import Bus
from towline.config import load_settings
from towline.contract.entries import LogEntry, OpenEntry, VersionEntry
from towline.errors import MissingError, UnavailableError
from towline.faults import VARIABLE
from towline.local.daemon import Daemon
from towline.local.effective import effective, with_made_model
from towline.local.run_directory import RunDirectory
from towline.local.servers import NatsServer, S3Server
from towline.runtime.run_end import run_has_ended
from towline.store.blobs import Blobs
from towline.store.log import Log
from towline.store.objects import open_store

TESTS = Path(__file__).parents[1]
TINY: dict[str, Any] = {
    "buffer.group_size": 4,
    "buffer.groups_per_batch": 4,
    "buffer.max_staleness": 1,
    "buffer.snapshot_every_records": 200,
    "eval.every": 10,
    "eval.prompts": 8,
    "model.arguments": {"layers": 1, "hidden": 32, "warm_up_steps": 5},
    "publisher.anchor_every": 6,
    "reward.ack_wait_seconds": 2.0,
    "rollout.ack_wait_seconds": 3.0,
    "rollout.poll_seconds": 0.2,
    "rollout.slots": 32,
    "trainer.checkpoint_every": 2,
}
FAULTY = {
    "prompts__environment": "fault.faulty:Environment",
    "reward__max_attempts": 1,
    "reward__function": "fault.faulty:reward",
}
"""The task with what goes wrong in life; the same with whole groups scored at a time:"""
FAULTY_GROUPS = FAULTY | {"reward__function": "fault.faulty:group_reward", "reward__scope": "group"}
LIMIT_SECONDS = 240.0
"""For any one thing to come about: a bound on a hang, not an expectation."""
POLL_SECONDS = 0.02
RESTART_SECONDS = 0.1
LASTING = "buffer"
"""It doesn't end by itself."""
MOST_FAULTS = 40
"""Ends of services that were neither killed nor fenced: the bus or the store was away for longer than they bear."""
_FENCED = 75


class Zygote:
    """The process that forks services (zygote.py); several fields may share it."""

    def __init__(self) -> None:
        # The file, not the module: its answers go to a pipe that nothing else may write to.
        path = os.pathsep.join([str(DEMO.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
        environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fault.zygote"], env={**os.environ, **environment, "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self._listeners: dict[str, Callable[[dict[str, Any]], None]] = {}
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(
        self, tag: str, argv: list[str], log: Path, environment: dict[str, str], told: Callable[[dict[str, Any]], None]
    ) -> None:
        """`told` hears {"pid"} and later {"pid", "code"}, on a thread of its own."""
        assert self._ready.wait(LIMIT_SECONDS), "the zygote never came up"
        order = {"tag": tag, "argv": argv, "log": str(log), "environment": environment}
        with self._lock:
            self._listeners[tag] = told
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "ready" in answer:
                self._ready.set()
            else:
                self._listeners[answer["tag"]](answer)


class Field:
    """A run that goes on until its last step, however often `kill` strikes. `field` makes one and clears it away."""

    def __init__(self, zygote: Zygote, folder: Path, settings: dict[str, Any], *, s3: bool) -> None:
        self.directory = RunDirectory(folder / "runs" / "field")
        self.faults_path = folder / "faults"
        """What stands here are the points at which services die, as in `TOWLINE_FAULT`."""
        self.kills: Counter[str] = Counter()
        """SIGKILLs that struck, by who was struck: those from here and those at a fault point."""
        self.exits: Counter[str] = Counter()
        """Ends by a fault, `SERVICE:CODE`."""
        self.done: set[str] = set()
        self._zygote, self._folder = zygote, folder
        self._given = TINY | {"run.name": "field", "run.directory": str(folder / "runs")} | settings
        self._servers: dict[str, Daemon] = {"nats-server": NatsServer(self.directory.path / "nats")}
        if s3:
            self._servers["s3-server"] = S3Server(self.directory.path / "s3")
        self._pids: dict[str, int] = {}
        self._stopping = False
        self._failure: BaseException | None = None
        self._log: Log | None = None
        self._marks = folder
        self._starts = 0
        self._held: set[str] = set()

    # a run's life

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """Servers and services run inside it."""
        with contextlib.ExitStack() as stack:
            for server in self._servers.values():
                stack.enter_context(contextlib.contextmanager(running)(server))
            self._configure()
            keeper = threading.Thread(target=self._keep_servers)
            keeper.start()
            try:
                for service in SERVICES:
                    self.serve(service)
                yield
            finally:
                self._stopping = True
                keeper.join()
                for pid in list(self._pids.values()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def serve(self, name: str) -> None:
        """Start a service (`SERVICE`, or `SERVICE.REPLICA` for one more), and again whenever it ends before its time."""
        service, _, replica = name.partition(".")
        argv = [f"towline.{service}", "--config", str(self.directory.settings_path), "--replica", replica or "0"]
        self._starts += 1
        self._zygote.start(
            f"{self._folder}/{name}/{self._starts}", argv, self.directory.log_path(name),
            {VARIABLE: f"<{self.faults_path}", "OMP_NUM_THREADS": "1"}, lambda answer: self._told(name, answer),
        )  # fmt: skip

    def _configure(self) -> None:
        given = load_settings(DEMO, self._given)
        nats, s3 = self._servers["nats-server"], self._servers.get("s3-server")
        assert isinstance(nats, NatsServer)
        store = given.store.model_copy(update={"url": (self._folder / "store").as_uri()})
        if isinstance(s3, S3Server):
            store = s3.settings(given.store)
        settings = effective(given, DEMO, self.directory, nats.settings(given.bus), store)
        self.directory.log_path("x").parent.mkdir(parents=True, exist_ok=True)
        self.directory.save(settings, DEMO)
        made = threading.Event()
        self._zygote.start(
            f"{self._folder}/model", ["towline.local.preflight", "--config", str(self.directory.settings_path), "--model"],
            self.directory.log_path("preflight"), {}, lambda answer: made.set() if "code" in answer else None,
        )  # fmt: skip
        assert made.wait(LIMIT_SECONDS)
        assert self.directory.model_path.is_dir(), self.account()
        self.settings = with_made_model(settings, self.directory)
        self.directory.save(self.settings, DEMO)
        self.objects = open_store(self.settings.store)

    def _told(self, service: str, answer: dict[str, Any]) -> None:
        code = answer.get("code")
        if code is None:
            self._pids[service] = answer["pid"]
            return
        self._pids.pop(service, None)
        if self._stopping:
            return
        if code == -signal.SIGKILL:
            self.kills[service] += 1
        elif code != _FENCED:
            self.exits[f"{service}:{code}"] += 1
        if code == 0 and self._has_ended():
            self.done.add(service)
        elif code == 2 or self.exits.total() > MOST_FAULTS:
            self._failure = AssertionError(f"{service} ended with {code}: {dict(self.exits)}")
        else:
            threading.Timer(RESTART_SECONDS, self._again, [service]).start()

    def _again(self, service: str) -> None:
        if not self._stopping:
            self.serve(service)

    def _keep_servers(self) -> None:
        while not self._stopping:
            time.sleep(POLL_SECONDS)
            for server in self._servers.values():
                if server.pid is None and not self._stopping and server.name not in self._held:
                    with contextlib.suppress(UnavailableError):  # tried again at once
                        server.start()

    # looking

    async def connect(self) -> Bus:
        name = self.settings.run.name
        return await Bus.connect(self.settings.bus, run=name, client_name="field", blobs=Blobs(self.objects, name))

    def ask(self, question: Callable[[Bus], Any]) -> Any:
        """The answer of an async function of the bus."""

        async def asked() -> Any:
            bus = await self.connect()
            try:
                return await question(bus)
            finally:
                await bus.close()

        return asyncio.run(asked())

    def _has_ended(self) -> bool:
        try:
            return bool(self.ask(lambda bus: run_has_ended(bus, self.settings.run.steps)))
        except UnavailableError:
            return False

    def pid(self, name: str) -> int | None:
        server = self._servers.get(name)
        return self._pids.get(name) if server is None else server.pid

    @property
    def names(self) -> list[str]:
        """Who may be killed."""
        return [*SERVICES, *self._servers]

    def depth(self) -> int:
        """The LOG's; -1 where it can't be read at this moment."""
        try:
            if self._log is None:
                self._log = Log(self.objects, self.settings.run.name)
            self._log.refresh()
            return self._log.lineage.depth(self._log.lineage.latest)
        except (UnavailableError, MissingError):
            return -1

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert self._failure is None, f"{self._failure}\n{self.account()}"
            assert time.monotonic() < deadline, f"{what}\n{self.account()}"
            time.sleep(POLL_SECONDS)

    def until_depth(self, depth: int) -> int:
        reached = -1

        def far_enough() -> bool:
            nonlocal reached
            reached = self.depth()
            return reached >= depth

        self.until(far_enough, f"depth {depth} was never reached")
        return reached

    # striking

    def kill(self, name: str) -> None:
        """SIGKILL it, waiting for it to be there first."""
        found: int | None = None

        def there() -> bool:
            nonlocal found
            found = self.pid(name)
            return found is not None

        self.until(there, f"{name} never ran")
        assert found is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(found, signal.SIGKILL)
            if name in SERVERS:
                self.kills[name] += 1

    @contextlib.contextmanager
    def without(self, server: str) -> Iterator[None]:
        """The server is killed, and starts again at the end."""
        self._held.add(server)
        self._servers[server].kill()
        try:
            yield
        finally:
            self._held.discard(server)

    def die_at(self, points: Sequence[str]) -> None:
        """Whoever reaches one of these from now on dies there, once; nobody at those of an earlier call."""
        self._marks = self._folder / f"marks-{len(list(self._folder.glob('marks-*')))}"
        self._marks.mkdir()
        temporary = self.faults_path.with_suffix(".tmp")
        temporary.write_text(",".join(f"{point}@{self._marks / point}" for point in points))
        temporary.replace(self.faults_path)

    def died_at(self) -> set[str]:
        """The points of the last `die_at` at which somebody did."""
        return {path.name for path in self._marks.iterdir()}

    # the end

    def audited(self) -> AuditReport:
        """Nothing lost, counted twice or over the bound so far; the run may go on meanwhile."""

        async def look(bus: Bus) -> AuditReport:
            return await audit(bus, Log(self.objects, self.settings.run.name), self.settings)

        report: AuditReport = self.ask(look)
        assert report.violations == [], [str(violation) for violation in report.violations]
        assert report.staleness_max <= self.settings.buffer.max_staleness
        return report

    async def _rebuilt(self, bus: Bus) -> State:
        state = await rebuild(bus, Blobs(self.objects, self.settings.run.name))
        await read_outcomes(bus, state)
        return state

    def is_done(self) -> bool:
        """Whether every service that ends by itself has."""
        return self.done >= set(SERVICES) - {LASTING}

    def assert_ended_well(self) -> AuditReport:
        """Waits for the run's end: nothing lost, counted twice, too stale, or open; every batch whole. Where history is purged
        the sums are those that a buffer would start with: the audit counts what it sees."""
        self.until(self.is_done, "the run never ended")
        report = self.audited()
        counts = report.counts
        assert report.finished, report.as_dict()
        assert counts.open == 0, report.as_dict()
        buffer, run = self.settings.buffer, self.settings.run
        assert report.depth == run.steps
        if buffer.keep_history:
            admitted, trained, evaluated, dropped = counts.admitted, counts.trained, counts.evaluated, counts.dropped
        else:
            assert any(report.purged.values()), report.as_dict()
            state = self.ask(self._rebuilt)
            assert state.open_train == state.eval_groups == {}
            admitted, trained, evaluated, dropped = state.admitted, state.totals.samples, state.evaluated, state.dropped
        assert admitted == trained + evaluated + sum(dropped.values())
        assert trained == run.steps * buffer.group_size * buffer.groups_per_batch
        return report

    def end_after(self, steps: int) -> None:
        """The run's length from now on: every service starts again with it. Nobody may be under way to die."""
        settings = self.settings.model_copy(update={"run": self.settings.run.model_copy(update={"steps": steps})})
        self.settings = settings
        self.directory.save(settings, DEMO)
        for service in SERVICES:
            if (pid := self._pids.get(service)) is not None:
                os.kill(pid, signal.SIGTERM)

    def entries(self) -> list[LogEntry]:
        self.depth()
        assert self._log is not None
        return self._log.entries()

    def epochs_and_forks(self) -> tuple[int, int]:
        """How many trainers opened an epoch, and how many of these began below the head of the one before."""
        epochs = forks = head = 0
        for entry in self.entries():
            if isinstance(entry, OpenEntry):
                epochs += 1
                forks += entry.base != head
                head = entry.base
            elif isinstance(entry, VersionEntry):
                head = entry.number
        return epochs, forks

    def account(self) -> str:
        """What happened, for a failed test's message."""
        logs = sorted((self.directory.path / "logs").glob("*.log"))
        tails = [f"{path.name}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:]) for path in logs]
        return "\n".join([f"kills {dict(self.kills)}, exits {dict(self.exits)}, done {sorted(self.done)}", *tails])


@contextlib.contextmanager
def field(zygote: Zygote, folder: Path, *, s3: bool = False, die_at: Sequence[str] = (), **settings: Any) -> Iterator[Field]:
    """A run that is up, and of which nothing is left afterwards. `settings`: over TINY, `section__key` for section.key;
    `die_at`: from the start on."""
    made = Field(zygote, folder, {key.replace("__", "."): value for key, value in settings.items()}, s3=s3)
    made.die_at(die_at)
    with made.up():
        yield made
