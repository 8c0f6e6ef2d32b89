"""What a replica hears of the run: the LOG, polled and at once on a hint, and where canaries are watched, the fleet."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import structlog

from towline.bus.client import Bus
from towline.bus.topology import ACKS, REPLICAS
from towline.contract.entries import LogEntry
from towline.contract.policy import decode_ack, decode_replica
from towline.errors import UnavailableError
from towline.replica.canary import CanaryWatch
from towline.replica.fleet import decoded
from towline.store.log import Log

_log = structlog.get_logger(__name__)


class Following:
    """`on_entries` is called with what is new in the LOG, on the event loop."""

    def __init__(self, bus: Bus, log: Log, *, poll_seconds: float, on_entries: Callable[[list[LogEntry]], None]) -> None:
        self._bus, self._log, self._poll_seconds, self._on_entries = bus, log, poll_seconds, on_entries
        self.caught_up = asyncio.Event()
        """The LOG was read to its end once: until then its lineage shows only the beginning."""
        self._poll = asyncio.Event()

    async def read_log(self) -> None:
        """For ever; a store that is away is waited out."""
        while True:
            self._poll.clear()
            try:
                new = await asyncio.to_thread(self._log.refresh)
            except UnavailableError as error:
                _log.warning("log_unreachable", reason=error.message)
                new = []
            else:
                self.caught_up.set()
            if new:
                self._on_entries(new)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_seconds):
                    await self._poll.wait()

    async def hear_hints(self) -> None:
        """For ever. They only save time."""
        while True:
            try:
                async for _ in self._bus.subscribe_hints("committed", "opened"):
                    self._poll.set()
            except UnavailableError as error:
                _log.warning("hints_unreachable", reason=error.message)
                await asyncio.sleep(self._poll_seconds)

    async def watch_canaries(self, watch: CanaryWatch, name: str, on_change: Callable[[], None]) -> None:
        """For ever; `on_change` after each look that may change which version is wanted."""
        before: tuple[bool, int] | None = None
        while True:
            try:
                replicas, acks = await self._bus.kv(REPLICAS).items(), await self._bus.kv(ACKS).items()
                names = {info.replica for info in decoded(replicas, decode_replica) if info.subscription == "canary"}
                acked = {ack.replica: ack.version for ack in decoded(acks, decode_ack)}
                if self._log.next_number:
                    now = time.monotonic()
                    watch.see(self._log.lineage, names, acked, now)
                    found = watch.is_canary(name, now), watch.cleared(self._log.lineage, now)
                    if found != before:
                        before = found
                        on_change()
            except UnavailableError as error:
                _log.warning("fleet_unreachable", reason=error.message)
            await asyncio.sleep(self._poll_seconds)


def lag(log: Log, version: int | None) -> dict[str, float | None]:
    """How far a replica of this version is behind the line's newest, in depths, and for how many seconds it has been."""
    lineage = log.lineage
    if version is None or 0 not in lineage:
        return {"version_lag_depths": None, "version_lag_seconds": None}
    depth = lineage.effective_depth(version)
    missing = lineage.version_reaching(depth + 1)
    return {
        "version_lag_depths": lineage.depth(lineage.latest) - depth,
        "version_lag_seconds": 0.0 if missing is None else max(time.time() - log.entry(missing).at, 0.0),
    }
