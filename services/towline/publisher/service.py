"""The publisher as a service: any number may run, since the LOG's create-only entries let one of them win each commit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from towline.bus.client import Bus
from towline.config import Settings
from towline.delta.codec import warm_up
from towline.publisher.publishing import Publishing
from towline.runtime.service import Service
from towline.store.objects import ObjectStore


class PublisherService(Service):
    """Verifies staged versions and commits them."""

    name: ClassVar[str] = "publisher"

    def __init__(self, settings: Settings, *, bus: Bus, objects: ObjectStore, replica: str) -> None:
        super().__init__(settings, bus=bus, objects=objects, replica=replica)
        self._publishing = Publishing(settings, bus, objects, self._tell)
        self._finished = False

    async def run(self) -> None:
        await asyncio.to_thread(warm_up)
        if await self._publishing.run(self.draining) == "ended":
            self._finished = True
            self.log.info("run_ended")

    def figures(self) -> Mapping[str, Any]:
        return self._publishing.figures() | {"finished": self._finished}

    def _tell(self, state: str | None) -> None:
        if state is None:
            self.health.ready()
        else:
            self.health.not_ready(state)
