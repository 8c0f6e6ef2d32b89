"""The rollout worker as a service: tasks from CONTROL in, trajectories and failures out, on the run's latest policy."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from towline.bus.client import Bus
from towline.config import Settings
from towline.contract.policy import Served
from towline.delta.codec import warm_up
from towline.engine.base import Activation
from towline.engine.choice import make_engine
from towline.rollout_worker.worker import Worker
from towline.runtime.service import Service
from towline.store.objects import ObjectStore

READY_POLL_SECONDS = 0.1
SWITCH_SECONDS = 0.0005
"""A decoding step takes and leaves the interpreter lock at each operation; with Python's 5 ms it would wait that long for the
event loop each time."""


class RolloutWorkerService(Service):
    """Generates samples with an engine that follows the run's policy. Ends when the run has ended."""

    name: ClassVar[str] = "rollout_worker"

    def __init__(self, settings: Settings, *, bus: Bus, objects: ObjectStore, replica: str) -> None:
        super().__init__(settings, bus=bus, objects=objects, replica=replica)
        sys.setswitchinterval(SWITCH_SECONDS)
        folder = Path(settings.run.directory) / settings.run.name / "replicas" / replica
        self._worker = Worker(
            name=replica,
            settings=settings,
            bus=bus,
            objects=objects,
            engine=make_engine(settings.rollout, replica),
            folder=folder,
        )
        make = self.metrics.histogram
        self._pause = make("activation_pause_seconds", "No token was generated for so long at an activation", ["mode"])
        self._prepare = make("version_prepare_seconds", "From wanting a version to having it verified on the host")
        self._convergence = make("version_convergence_seconds", "From a version's LOG entry to serving it here")
        self._worker.replica.on_served = self._count

    def _count(self, served: Served, activation: Activation, prepare_seconds: float, mode: str) -> None:
        self._pause.labels(mode).observe(activation.pause_seconds)
        self._prepare.observe(prepare_seconds)
        if mode != "initial":  # a replica that joins finds versions of any age
            self._convergence.observe(max(served.at - served.published_at, 0.0))

    def figures(self) -> Mapping[str, Any]:
        return self._worker.report()

    async def run(self) -> None:
        telling = asyncio.create_task(self._tell())
        draining = asyncio.create_task(self._pass_on_drain())
        try:
            await asyncio.to_thread(warm_up)
            await self._worker.run()
        finally:
            telling.cancel()
            draining.cancel()
            await asyncio.gather(telling, draining, return_exceptions=True)

    async def _pass_on_drain(self) -> None:
        await self.draining.wait()
        self._worker.drain()

    async def _tell(self) -> None:
        while True:
            why = self._worker.not_ready
            if why is None:
                self.health.ready()
            else:
                self.health.not_ready(why)
            await asyncio.sleep(READY_POLL_SECONDS)
