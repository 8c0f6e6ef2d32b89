"""python -m towline.loadtest.ends: one end of one hop, as a process. JSON in, JSON out: its plan and what it found.

Both ends of a hop keep the same number of messages in flight, whatever the system. A message begins with the time at which it was
meant to be sent, so that a latency counts from there even where the sender was held up: no coordinated omission.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import uvloop

from towline.errors import UsageError

HEAD = struct.Struct("<dq")
"""Intended time (Unix seconds) and number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What both ends are told."""

    role: str
    system: str
    """towline, nats (nats-py alone) or s3 (the S3 client alone)."""
    messages: int
    payload_bytes: int
    window: int
    profile: list[tuple[float, float]] = field(default_factory=list)
    """Open loop: (seconds, messages a second) one after the other; none: the closed loop."""
    run: str
    bus: dict[str, Any]
    store: dict[str, Any]
    sender: int = 0
    stream: str = ""


class Source(Protocol):
    """The sending end of a system."""

    async def open(self) -> None: ...
    async def send(self, number: int, payload: bytes) -> None:
        """Return once the message is durable."""
        ...

    async def close(self) -> None: ...


class Sink(Protocol):
    """The receiving end."""

    async def open(self) -> None: ...
    def receive(self) -> AsyncIterator[bytes]:
        """Payloads, whole and in hand; `window` fetched at a time."""
        ...

    async def close(self) -> None: ...


def intended(profile: list[tuple[float, float]]) -> list[float]:
    """Seconds after the start at which each message is to be sent."""
    times, begin = [], 0.0
    for seconds, rate in profile:
        times += [begin + number / rate for number in range(int(seconds * rate))]
        begin += seconds
    return times


async def produce(plan: Plan, source: Source) -> dict[str, Any]:
    """Send everything, `plan.window` in flight; when the first was sent, when the last was durable, and each one's ack time."""
    body = os.urandom(plan.payload_bytes - HEAD.size)
    schedule = intended(plan.profile)
    count = len(schedule) or plan.messages
    began = time.time() + (0.05 if schedule else 0.0)
    numbers = iter(range(count))
    acks: list[float] = []
    late = 0.0

    async def lane() -> None:
        nonlocal late
        for number in numbers:
            at = began + schedule[number] if schedule else 0.0
            if schedule:
                if (wait := at - time.time()) > 0:
                    await asyncio.sleep(wait)
                late = max(late, time.time() - at)
            meant = at or time.time()
            await source.send(number, HEAD.pack(meant, plan.sender * 10**9 + number) + body)
            acks.append(time.time() - meant)

    async with asyncio.TaskGroup() as group:
        for _ in range(plan.window):
            group.create_task(lane())
    return {"began": began, "ended": time.time(), "acks": acks, "late": late, "sent": count}


async def consume(plan: Plan, sink: Sink) -> dict[str, Any]:
    """Receive `plan.messages`; each one's latency from its intended time, and how many came twice."""
    latencies: list[float] = []
    seen: set[int] = set()
    twice, first, last = 0, 0.0, 0.0
    async for payload in sink.receive():
        last = time.time()
        first = first or last
        at, number = HEAD.unpack_from(payload)
        if number in seen:
            twice += 1
            continue
        if len(payload) != plan.payload_bytes:
            raise UsageError(f"message {number} has {len(payload)} bytes, {plan.payload_bytes} were sent", code="payload")
        seen.add(number)
        latencies.append(last - at)
        if len(seen) == plan.messages:
            break
    return {"first": first, "last": last, "latencies": latencies, "twice": twice, "received": len(seen)}


async def main(plan: Plan, made: Source | Sink) -> dict[str, Any]:
    go = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_listen, args=(lambda: loop.call_soon_threadsafe(go.set),), daemon=True).start()
    await made.open()
    print("ready", flush=True)
    await go.wait()  # the other ends are ready too
    run: Callable[[Plan, Any], Awaitable[dict[str, Any]]] = produce if plan.role == "produce" else consume
    before = time.process_time()
    try:
        return await run(plan, made) | {"cpu_seconds": time.process_time() - before}
    finally:
        await made.close()


def _listen(go: Callable[[], object]) -> None:
    """Call `go` at a line of standard input. At its end whoever started this process is gone, killed perhaps: end with it."""
    while sys.stdin.readline():
        go()
    os._exit(1)


def as_program(source_of: Callable[[Plan], Source], sink_of: Callable[[Plan], Sink]) -> None:
    """Be the end that standard input's first line describes, and end the process."""
    plan = Plan(**json.loads(sys.stdin.readline()))
    print(json.dumps(uvloop.run(main(plan, source_of(plan) if plan.role == "produce" else sink_of(plan)))), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    from towline.loadtest import systems

    as_program(systems.source_of, systems.sink_of)
