"""python -m loadtests.queues.crash [--systems …]: what a kill -9 leaves of what was acknowledged, by killing.

For each system a sender sends 2,000 messages of 64 KiB, 64 at a time. Once 1,000 are acknowledged the processes that hold them
get a SIGKILL; they come back as the system, or its operator, brings them back; the sender goes on with what wasn't acknowledged.
Then a receiver takes all there is. ZMQ has nothing between the ends: there the sender is killed, and in a second trial the
receiver.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from loadtests.queues.__main__ import OURS, SCENARIO, Queues
from loadtests.queues.ends import OTHERS
from loadtests.queues.holders import Holder, held

from towline.loadtest.ends import Plan
from towline.loadtest.scenario import load_scenario
from towline.local.servers import NatsServer

MESSAGES, KILL_AT = 2000, 1000
SHAPE: dict[str, Any] = {"messages": MESSAGES, "payload_bytes": 65536, "window": 64}
STILL_SECONDS = 12.0
"""Without a new line in a record nothing more is expected: longer than any client's own back-off here."""
SEND_SECONDS = 90.0
"""For the sender to come to its end after the kill; where a system doesn't come back it never does."""


@dataclass(frozen=True, slots=True)
class Trial:
    system: str
    killed: str
    back: str
    """How it came back."""
    acknowledged: int
    """Before the kill."""
    lost: int
    """Of those; no receiver ever had them."""
    sent_after: int
    """Acknowledged after the kill, of MESSAGES in all."""
    twice: int

    def row(self) -> str:
        return (f"| {self.system} | {self.killed} | {self.acknowledged:,} | {self.lost:,} | {self.sent_after:,} | {self.twice:,} "
                f"| {self.back} |")  # fmt: skip


class NatsHolder(Holder):
    def __init__(self, folder: Path, run: str) -> None:
        self._server, self._run, self._folder = NatsServer(folder / "nats"), run, folder

    async def start(self) -> None:
        await asyncio.to_thread(self._server.start)
        await Queues(load_scenario(SCENARIO), self._folder, self._run, print)._prepare(self._server.settings())

    async def stop(self) -> None:
        await asyncio.to_thread(self._server.stop)

    async def kill(self) -> str:
        await asyncio.to_thread(self._server.kill)
        return "nats-server"

    async def restart(self) -> str:
        await asyncio.to_thread(self._server.start)
        return "nats-server started on its files"

    def bus(self) -> dict[str, Any]:
        return {"url": self._server.settings().url}


class End:
    """One mortal end."""

    def __init__(self, role: str, plan: Plan, record: Path) -> None:
        self._role, self._plan, self.record = role, plan, record
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.record.touch()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "loadtests.queues.mortal", self._role, str(self.record), stdin=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(self._plan)).encode() + b"\n")
        await self._process.stdin.drain()

    async def kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def numbers(self) -> list[int]:
        return [int(line) for line in self.record.read_text().split("\n")[:-1]]

    async def until(self, count: int, seconds: float) -> None:
        """So many lines, or none for STILL_SECONDS once there was one, or the time is over."""
        deadline, seen, at = time.monotonic() + seconds, -1, time.monotonic()
        while time.monotonic() < deadline and len(set(self.numbers())) < count:
            if (now := len(self.numbers())) != seen:
                seen, at = now, time.monotonic()
            elif seen > 0 and time.monotonic() - at > STILL_SECONDS:
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def ends(*made: End) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for end in made:
            if end.record.exists():
                await end.kill()


async def holder_dies(system: str, folder: Path) -> Trial:
    run = f"crash-{os.getpid()}"
    async with _holding(system, folder, run) as holder:
        bus = holder.bus() if isinstance(holder, NatsHolder) else {}
        store = {"url": (folder / "store").as_uri()}
        plan = Plan(role="produce", system=system, run=run, bus=bus, store=store, stream=f"raw_{run}", **SHAPE)
        sender, receiver = End("send", plan, folder / "sent"), End("receive", plan, folder / "received")
        async with ends(sender, receiver):
            await sender.start()
            await sender.until(KILL_AT, 120)
            if system == "zmq":
                await sender.kill()
                killed, back, before = "the sender", "another sender", sender.numbers()
            else:
                killed = await holder.kill()
                before = sender.numbers()
                back = await holder.restart()
                await sender.until(MESSAGES, SEND_SECONDS)
            await receiver.start()
            await receiver.until(MESSAGES, SEND_SECONDS)
            return _trial(system, killed, back, before, sender.numbers(), receiver.numbers())


async def receiver_dies(folder: Path) -> Trial:
    """ZMQ's other end: it has taken some, more wait in its socket, and it's killed."""
    async with held("zmq"):
        plan = Plan(role="consume", system="zmq", run="crash", bus={}, store={}, **SHAPE)
        sender = End("send", plan, folder / "sent")
        first, second = (End("receive", plan, folder / name) for name in ("a", "b"))
        async with ends(sender, first, second):
            await first.start()
            await sender.start()
            await first.until(KILL_AT // 2, 60)
            first.pause()  # it's busy with a batch; what comes meanwhile waits in its socket
            await sender.until(MESSAGES, STILL_SECONDS)
            await first.kill()
            before = sender.numbers()
            await second.start()
            await sender.until(MESSAGES, SEND_SECONDS)
            await second.until(MESSAGES - len(set(first.numbers())), SEND_SECONDS)
            return _trial("zmq", "the receiver", "another receiver", before, sender.numbers(), first.numbers() + second.numbers())


def _trial(system: str, killed: str, back: str, before: list[int], sent: list[int], received: list[int]) -> Trial:
    had = Counter(received)
    return Trial(system, killed, back, len(before), sum(number not in had for number in before), len(sent) - len(before),
                 sum(count - 1 for count in had.values()))  # fmt: skip


@asynccontextmanager
async def _holding(system: str, folder: Path, run: str) -> AsyncIterator[Holder]:
    if system not in OURS:
        async with held(system) as holder:
            yield holder
        return
    nats = NatsHolder(folder, run)
    try:
        await nats.start()
        yield nats
    finally:
        await nats.stop()


async def main(systems: list[str]) -> None:
    print("| system | kill -9 of | acknowledged before | of those lost | acknowledged after | received twice | what came back |")
    print("|---|---|---|---|---|---|---|")
    for system in systems:
        for trial in (holder_dies, receiver_dies) if system == "zmq" else (holder_dies,):
            folder = Path(tempfile.mkdtemp(prefix="crash"))
            try:
                found = await (trial(system, folder) if trial is holder_dies else receiver_dies(folder))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            print(found.row(), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--systems", default=",".join((*OURS, *OTHERS)))
    uvloop.run(main(list(filter(None, parser.parse_args().systems.split(",")))))
