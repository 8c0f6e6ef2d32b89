"""The buffer as a service: one leads under the lease, others stand by; CONTROL's compare-and-swap decides who may write."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar

from towline.buffer.figures import HANGING, figures
from towline.buffer.leader import Leader
from towline.buffer.queues import Queues
from towline.bus.client import Bus
from towline.config import Settings
from towline.errors import InvariantError, UnavailableError
from towline.runtime.service import Service
from towline.store.objects import ObjectStore

RETRY_SECONDS = 1.0
STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
LAST_WORDS_SECONDS = 3.0
"""A run that a broken promise stops says so for this long: its status is published every second."""


class BufferService(Service):
    """Admits, bounds, batches and evaluates, and says when the run is over. It stays to say so until it's asked to stop."""

    name: ClassVar[str] = "buffer"
    lease: ClassVar[str | None] = "buffer"

    def __init__(self, settings: Settings, *, bus: Bus, objects: ObjectStore, replica: str) -> None:
        super().__init__(settings, bus=bus, objects=objects, replica=replica)
        self._leader = Leader(settings, bus, objects, self._tell)
        self._named_state = ""
        self._queues = Queues(bus, self.metrics)
        self.metrics.show_histogram(
            "trained_sample_staleness_depths", "Staleness of the standing batches' samples, in depths",
            lambda: self._leader.state.totals.staleness, STALENESS_BUCKETS,
        )  # fmt: skip

    async def run(self) -> None:
        looking = asyncio.create_task(self._queues.run(), name="queues")
        try:
            await self._lead()
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _lead(self) -> None:
        while not self.draining.is_set():
            try:
                await self._leader.lead(self.draining)
            except InvariantError as error:
                await self._say_why(error)
                raise
            except UnavailableError as error:
                if error.code == "stream_regressed":
                    self.log.error("stream_regressed", reason=error.message)
                # The fate of what was appended last is unknown: everything is read again, and CONTROL taken over anew.
                self.health.not_ready(f"unavailable: {error.message}")
                self.log.warning("unavailable", code=error.code, reason=error.message)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_SECONDS):
                        await self.draining.wait()

    async def _say_why(self, error: InvariantError) -> None:
        """The named state stands in the status for a moment before the process ends by it."""
        self.health.not_ready(f"{error.code}: {error.message}")
        self._named_state = f"{error.code}: {error.message}"
        self.log.error("stopped", code=error.code, reason=error.message)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.draining.wait(), LAST_WORDS_SECONDS)

    def figures(self) -> Mapping[str, Any]:
        leader = self._leader
        end = leader.state.ended if leader.finished else None
        return (
            figures(leader.state, leader.lineage, self.settings.run.steps)
            | leader.waiting()
            | {
                "finished": leader.finished,
                "end_reason": end.reason if end is not None else None,
                "state": self._named_state,
                "fleet_slots": leader.fleet.slots,
                "requests_refused": leader.requests.refused,
            }
        )

    def _tell(self, state: str) -> None:
        if state != self._named_state:
            self.log.info("state", state=state or "running")
        self._named_state = state
        if state.partition(":")[0] in (*HANGING, "replaying"):
            self.health.not_ready(state)
        else:
            self.health.ready(state)
