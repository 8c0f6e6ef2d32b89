"""What every process of the benchmark has: a bus, a store, and orders by standard input.

`plain`, `screens`, `web`, `readers` and `traced` name the arm that begins; `count` is answered with a line of JSON: this
process's counts so far.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from abc import ABC, abstractmethod

from towline import spans
from towline.bus.client import Bus
from towline.config import Settings
from towline.runtime.tracing import Tracing, begin
from towline.spans import Tracer
from towline.store.objects import ObjectStore


class Part(ABC):
    """A process's bus, store and orders."""

    def __init__(self, settings: Settings, bus: Bus, objects: ObjectStore, endpoint: str) -> None:
        self.settings, self.bus, self.objects = settings, bus, objects
        self.run = settings.run.name
        self.arm = "plain"
        self.counts: dict[str, float] = {}
        found = begin(settings.telemetry.model_copy(update={"endpoint": endpoint}), service="bench", replica="0", run=self.run)
        assert found is not None
        self._tracing: Tracing = found
        self.tracer: Tracer | None = spans.tracer
        spans.install(None)

    def turn(self, arm: str) -> None:
        self.arm = arm
        spans.install(self.tracer if arm == "traced" else None)

    @abstractmethod
    async def work(self) -> None: ...

    async def obey(self) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := (await reader.readline()).decode().strip():
            if line == "count":
                used = resource.getrusage(resource.RUSAGE_SELF)
                answer = json.dumps(self.counts | {"cpu_seconds": used.ru_utime + used.ru_stime})
                print(answer, file=sys.__stdout__, flush=True)  # sys.stdout is the terminal while a screen is on
            else:
                self.turn(line)
