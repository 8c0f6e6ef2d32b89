"""The trainer as a service: one at a time holds the lease, the others stand by; the LOG's `open` fences a former one for good."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from towline.bus.client import Bus
from towline.config import Settings
from towline.runtime.service import Service
from towline.store.objects import ObjectStore
from towline.trainer.crew import Crew
from towline.trainer.figures import Figures
from towline.trainer.loading import Loading
from towline.trainer.run import run_trainer


class TrainerService(Service):
    """Trains on the buffer's batches and stages policy versions."""

    name: ClassVar[str] = "trainer"
    lease: ClassVar[str | None] = "trainer"

    def __init__(self, settings: Settings, *, bus: Bus, objects: ObjectStore, replica: str) -> None:
        super().__init__(settings, bus=bus, objects=objects, replica=replica)
        self._figures = Figures()
        self._finished = False
        # Before the lease is held, both: the learner's code is loaded, and the other ranks are told to wait.
        self._loading = Loading(settings.trainer.backend)
        self._crew = Crew(settings, objects)
        self._crew.begin()

    async def run(self) -> None:
        self._tell("loading")
        await asyncio.to_thread(self._loading.wait)
        await run_trainer(
            self.settings, self.bus, self.objects, replica=self.replica, figures=self._figures, draining=self.draining,
            tell=self._tell, crew=self._crew,
        )  # fmt: skip
        # After an error the others see this process end, and end too.
        await asyncio.to_thread(self._crew.stop)
        self._finished = not self.draining.is_set()

    def figures(self) -> Mapping[str, Any]:
        return self._figures.plain() | {"finished": self._finished}

    def _tell(self, state: str | None) -> None:
        if state is None:
            self.health.ready()
        else:
            self.health.not_ready(state)
