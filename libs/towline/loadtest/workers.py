"""python -m towline.loadtest.workers --config run.toml --replica N: a share of the load test's workers in one process.

Each is a whole rollout worker with its own connection, replica and engine; they share the process's event loop and threads.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from towline.bus.client import Bus
from towline.config import Settings
from towline.delta.codec import warm_up
from towline.engine.choice import make_engine
from towline.loadtest.plan import read_plan
from towline.loadtest.timing import TimedEngine, Timings
from towline.rollout_worker.worker import Worker
from towline.runtime.service import Service, service_main
from towline.store.blobs import Blobs
from towline.store.objects import ObjectStore

TOGETHER = 16
"""Connections that are opened at a time."""
SUMS = (
    "busy", "slots", "trajectories", "tokens", "superseded", "cancelled", "handed_over", "tokens_resumed", "activations",
    "prepare_seconds", "pause_seconds", "wire_bytes", "tokens_per_second",
)  # fmt: skip


class Workers(Service):
    """Every `processes`-th worker of the load test."""

    name: ClassVar[str] = "rollout_worker"

    def __init__(self, settings: Settings, *, bus: Bus, objects: ObjectStore, replica: str) -> None:
        super().__init__(settings, bus=bus, objects=objects, replica=replica)
        self._load = read_plan(settings)
        self._numbers = range(int(replica), self._load.workers, self._load.processes)
        self._workers: list[Worker] = []
        self._buses: list[Bus] = []
        self._timings = Timings()

    def figures(self) -> Mapping[str, Any]:
        reports = [worker.report() for worker in self._workers]
        failures: Counter[str] = Counter()
        for report in reports:
            failures.update(report["failures"])
        versions = [report["version"] for report in reports if report["version"] is not None]
        serving = Counter(str(version) for version in versions)
        return {name: sum(report[name] for report in reports) for name in SUMS} | {
            "failures": dict(failures), "workers": len(reports), "version": max(versions, default=None), "depth": None,
            "serving": dict(serving), "timings": self._timings.plain(),
        }  # fmt: skip

    async def run(self) -> None:
        await asyncio.to_thread(warm_up)
        gate = asyncio.Semaphore(TOGETHER)
        telling = asyncio.create_task(self._tell())
        draining = asyncio.create_task(self._pass_on_drain())
        try:
            async with asyncio.TaskGroup() as group:
                for number in self._numbers:
                    group.create_task(self._one(number, gate))
        finally:
            telling.cancel()
            draining.cancel()
            await asyncio.gather(telling, draining, return_exceptions=True)
            await asyncio.gather(*[bus.close() for bus in self._buses], return_exceptions=True)

    async def _one(self, number: int, gate: asyncio.Semaphore) -> None:
        settings, run = self.settings, self.settings.run.name
        replica = f"w{number:05d}"
        async with gate:
            bus = await Bus.connect(settings.bus, run=run, client_name=f"{run}.{replica}", blobs=Blobs(self.objects, run))
        self._buses.append(bus)
        engine = TimedEngine(make_engine(settings.rollout, replica), self._timings)
        folder = Path(settings.run.directory) / run / "replicas" / replica
        worker = Worker(name=replica, settings=settings, bus=bus, objects=self.objects, engine=engine, folder=folder)
        self._workers.append(worker)
        if self.draining.is_set():
            worker.drain()
        await worker.run()

    async def _pass_on_drain(self) -> None:
        await self.draining.wait()
        for worker in self._workers:
            worker.drain()

    async def _tell(self) -> None:
        while True:
            ready = sum(worker.not_ready is None for worker in self._workers)
            if ready == len(self._numbers):
                self.health.ready()
            else:
                self.health.not_ready(f"{ready} of {len(self._numbers)} workers serve")
            await asyncio.sleep(1.0)


if __name__ == "__main__":
    service_main(Workers)
