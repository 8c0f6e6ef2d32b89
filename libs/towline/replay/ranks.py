"""A stretch of a replay that several ranks train: torchrun starts them on this machine, rank 0 reads the streams for all.

Each rank opens the source itself for weights and LOG. Rank 0 reports to the process that launched it, a JSON object a line in a
file; a rank that dies ends them all, and the replay.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from towline import errors
from towline.bundle.line import BatchAt, Step, read_batches, steps
from towline.bundle.source import Source
from towline.contract.control import BatchRecord
from towline.errors import TowlineError, UnavailableError
from towline.learner.world import RANK_LOST, World, join_world
from towline.replay.again import DEVICE, Again, Payloads, Taken
from towline.replay.report import EnvironmentDifferences, VerifyReport
from towline.replay.verify import Job, Launch, train_again

POLL_SECONDS = 0.1
RANK_TIMEOUT_SECONDS = 1800.0
STOP_SECONDS = 10.0
_TAIL = 16_384
OpenSource = Callable[[str], AbstractAsyncContextManager[Source]]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is told, as a file: versions `first` to `last` of the line from `start` on, of `target`."""

    target: str
    code: str | None
    launcher: int
    start: int
    first: int
    last: int
    changes: dict[str, Any]
    go_on: bool
    scratch: str
    handed_over: str | None
    leave: str | None
    events: str
    run: str
    environments: dict[int, EnvironmentDifferences]
    unrecorded: list[int]
    """Those of the versions before."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of them."""

    taken: Taken | None = None
    stopped: str | None = None
    error: tuple[str, str, str] | None = None
    """(class, code, message)"""
    done: bool = False


class _Take(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0 to the others: the next version. None is the end."""

    version: int
    batches: list[tuple[int, BatchRecord]]
    payloads: list[list[tuple[bytes, str]]]
    """Of each row: its bytes, or the reason why there are none."""


_orders = msgspec.msgpack.Decoder(_Take | None)


def launcher(target: str, command: Sequence[str], code: Path | None = None) -> Launch:
    """Starts ranks that read `target`. `command` is what each runs under torchrun, given the order's file."""
    folder_of_code = None if code is None else str(code.resolve())

    async def launch(job: Job) -> None:
        steps_ = job.stretch.steps
        folder = job.scratch / f"order-{steps_[0].entry.number}"
        folder.mkdir()
        order = Order(
            target=target, code=folder_of_code, launcher=os.getpid(), start=job.report.start,
            first=steps_[0].entry.number, last=steps_[-1].entry.number, changes=dict(job.changes), go_on=job.go_on,
            scratch=str(job.scratch), handed_over=None if job.handed_over is None else str(job.handed_over),
            leave=None if job.leave is None else str(job.leave), events=str(folder / "events"), run=job.report.run,
            environments=job.report.environments, unrecorded=job.report.unrecorded,
        )  # fmt: skip
        (folder / "order.json").write_bytes(msgspec.json.encode(order))
        await _run(job, folder, [*command, str(folder / "order.json")])

    return launch


async def _run(job: Job, folder: Path, command: Sequence[str]) -> None:
    """torchrun and its ranks to their end; what rank 0 reports is taken in as it comes."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(job.stretch.threads),
        "CUDA_VISIBLE_DEVICES": "",  # Megatron-Core would take one
        "TOKENIZERS_PARALLELISM": "false",
    }
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with (folder / "output").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.stretch.ranks}", *command,
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True,
        )  # fmt: skip
    reader = _Events(folder / "events", job)
    try:
        ended = asyncio.create_task(process.wait())
        while not ended.done():
            await asyncio.wait([ended], timeout=POLL_SECONDS)
            reader.read()
        reader.read()
    finally:
        await _end(process)
    reader.check(process.returncode or 0, folder / "output")


async def _end(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()


class _Events:
    """Rank 0's lines, each taken in once."""

    def __init__(self, path: Path, job: Job) -> None:
        self._path = path
        self._job = job
        self._place = 0
        self._error: tuple[str, str, str] | None = None
        self._done = False

    def read(self) -> None:
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # the rest comes
                self._place += len(line)
                self._take(msgspec.json.decode(line, type=Event))

    def check(self, code: int, output: Path) -> None:
        """Raise what ended the ranks before the stretch's end."""
        if self._error is not None:
            name, code_name, message = self._error
            kind = getattr(errors, name, TowlineError)
            cls = kind if isinstance(kind, type) and issubclass(kind, TowlineError) else TowlineError
            raise cls(message, code=code_name)
        if not self._done:
            said = last_words(output.read_bytes()[-_TAIL:].decode(errors="replace"))
            raise UnavailableError(
                f"the replay's {self._job.stretch.ranks} ranks ended early (exit code {code}): {said}", code=RANK_LOST
            )

    def _take(self, event: Event) -> None:
        report = self._job.report
        if event.taken is not None:
            opened = event.taken.opened
            report.add(event.taken.result, None if opened is None else (opened.epoch, opened.differences))
            self._job.tell(event.taken.result)
        report.stopped = event.stopped or report.stopped
        self._error = event.error or self._error
        self._done = self._done or event.done


def last_words(output: str) -> str:
    """What a rank said of its end, or torchrun of a rank that couldn't."""
    lines = [line.strip() for line in output.splitlines() if line.strip(" =-")]
    for telling in (r"rank \d+: ", r"(\w+Error: |traceback : Signal )"):
        found = [line for line in lines if re.match(telling, line)]
        if found:
            return found[-1].removeprefix("traceback : ")
    return lines[-1] if lines else "they said nothing"


def run_rank(path: Path, open_source: OpenSource) -> int:
    """A rank's whole life; its exit code. What it can't do is told by rank 0, whichever rank met it."""
    order = msgspec.json.decode(path.read_bytes(), type=Order)
    _end_with(order.launcher)
    if order.code is not None:
        sys.path.insert(0, order.code)
    rank = int(os.environ.get("RANK", "0"))
    try:
        asyncio.run(_rank(order, open_source))
    except TowlineError as error:
        print(f"rank {rank}: {error.code}: {error.message}", file=sys.stderr, flush=True)
        if rank == 0:
            _tell(order, Event(error=(type(error).__name__, error.code, error.message)))
        return error.exit_status
    return 0


async def _rank(order: Order, open_source: OpenSource) -> None:
    loop = asyncio.get_running_loop()
    # One thread for all of it, as in a replay by one process.
    with ThreadPoolExecutor(1, "towline-replay") as pool:
        world = await loop.run_in_executor(pool, join_world, DEVICE, RANK_TIMEOUT_SECONDS)
        async with open_source(order.target) as source:
            again = Again(
                source, Path(order.scratch), order.start, order.changes, world=world,
                handed_over=None if order.handed_over is None else Path(order.handed_over),
            )  # fmt: skip
            await loop.run_in_executor(pool, again.prepare)
            if world.rank == 0:
                await _Leader(order, source, again, world, pool).run()
            else:
                await loop.run_in_executor(pool, _follow, order, source, again, world)


@dataclass(slots=True)
class _Leader:
    """Rank 0: reads, tells the others, reports."""

    order: Order
    source: Source
    again: Again
    world: World
    pool: ThreadPoolExecutor

    async def run(self) -> None:
        order, log = self.order, self.source.log
        report = VerifyReport(run=order.run, start=order.start, end=order.last, planned=0)
        report.environments, report.unrecorded = dict(order.environments), list(order.unrecorded)
        planned = steps(log, await read_batches(self.source), order.start, order.last)
        mine = [step for step in planned if step.entry.number >= order.first]
        await train_again(
            self.source, mine, report, self._take, go_on=order.go_on, tell=lambda taken: _tell(order, Event(taken=taken))
        )
        loop = asyncio.get_running_loop()
        whole = len(report.results) == len(mine)
        await loop.run_in_executor(self.pool, self.world.broadcast, msgspec.msgpack.encode(None))
        await loop.run_in_executor(self.pool, self.world.broadcast, b"leave" if whole and order.leave is not None else b"end")
        if whole and order.leave is not None:
            await loop.run_in_executor(self.pool, self.again.leave, Path(order.leave))
        _tell(order, Event(stopped=report.stopped, done=True))

    async def _take(self, step: Step, payloads: Payloads) -> Taken:
        batches = [(batch.sequence, batch.record) for batch in step.batches]
        pairs = [[(row, "") if isinstance(row, bytes) else (b"", row) for row in batch] for batch in payloads]
        told = msgspec.msgpack.encode(_Take(version=step.entry.number, batches=batches, payloads=pairs))

        def take() -> Taken:
            self.world.broadcast(told)
            return self.again.take(step.entry, step.batches, payloads)

        return await asyncio.get_running_loop().run_in_executor(self.pool, take)


def _follow(order: Order, source: Source, again: Again, world: World) -> None:
    while (take := _orders.decode(world.broadcast(None))) is not None:
        batches = tuple(BatchAt(record, sequence) for sequence, record in take.batches)
        with contextlib.suppress(errors.InvariantError):  # of the rows: rank 0 finds the same, and says so
            again.take(source.log.version(take.version), batches, [[why or row for row, why in batch] for batch in take.payloads])
    if world.broadcast(None) == b"leave":
        assert order.leave is not None
        again.leave(Path(order.leave))


def _tell(order: Order, event: Event) -> None:
    with Path(order.events).open("ab") as file:
        file.write(msgspec.json.encode(event) + b"\n")


def _end_with(launcher_pid: int) -> None:
    """End this process once its launcher, or torchrun, is gone: nobody would end it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and _alive(launcher_pid):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="towline-parent", daemon=True).start()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
