"""A service that does what a test wants of one: `PROBE` in the environment says how it behaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping

from towline.errors import FencedError, UnavailableError
from towline.runtime.service import Service, service_main

BEHAVIOUR = os.environ.get("PROBE", "work")


class Probe(Service):
    """Works until it's asked to stop, and writes a dead letter a tick so that a test sees that it does."""

    name = "probe"
    lease = os.environ.get("PROBE_LEASE")
    ticks = 0
    stored = 0

    def figures(self) -> Mapping[str, object]:
        return {"ticks": self.ticks, "stored": self.stored, "dropped": {"stale": 2}, "note": "text"}

    async def run(self) -> None:
        self.health.ready("working")
        if BEHAVIOUR == "done":
            return
        if BEHAVIOUR == "fenced":
            raise FencedError("another\nprobe took over".replace("\n", " "))
        if BEHAVIOUR == "crash":
            raise ValueError("a\nbug")
        if BEHAVIOUR == "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(60))
                group.create_task(self._raise(UnavailableError("the store is away")))
                group.create_task(self._raise(FencedError("succeeded")))
        if BEHAVIOUR == "deaf":
            await asyncio.to_thread(time.sleep, 60)
        while not self.draining.is_set():
            await self.bus.dead("tick", b"%d" % self.ticks, "tick", pid=os.getpid())
            with contextlib.suppress(UnavailableError):
                await asyncio.to_thread(self.objects.put, f"{self.settings.run.name}/tick", b"%d" % self.ticks)
                self.stored += 1
            self.ticks += 1
            await asyncio.sleep(0.02)
        self.log.info("drained", ticks=self.ticks, password="s3cr3t-value")

    async def _raise(self, error: Exception) -> None:
        raise error


if __name__ == "__main__":
    service_main(Probe)
