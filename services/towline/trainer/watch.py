"""The LOG as it grows: polled, and looked at at once where a hint on the bus says so.

It is how the trainer learns that its version stands, that it was refused, or that the epoch isn't its own any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NoReturn

import structlog

from towline.bus.client import Bus
from towline.bus.topology import POLICY
from towline.contract.policy import Refused, decode_policy
from towline.errors import FencedError, TowlineError, UnavailableError
from towline.store.log import Log

CANCEL_SECONDS = 0.5

log_line = structlog.get_logger(__name__)


class LogWatch:
    """`run` in the background; `check` and `wait` wherever it matters."""

    def __init__(self, log: Log, bus: Bus, poll_seconds: float) -> None:
        self.log = log
        self.epoch: int | None = None
        """Once set, a newer `open` fences this process."""
        self._bus = bus
        self._poll_seconds = poll_seconds
        self._refusals: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()

    async def run(self) -> NoReturn:
        """Poll for ever. `FencedError` when another trainer took over; a store that is away is asked again."""
        hints = asyncio.create_task(self._listen(), name="trainer-hints")
        try:
            while True:
                self._wake.clear()
                with contextlib.suppress(UnavailableError):
                    await self.refresh()
                    self.check()
                await pause(self._wake, self._poll_seconds)
        finally:
            await cancel(hints)

    async def refresh(self) -> None:
        """Read the LOG to its head."""
        if await asyncio.to_thread(self.log.refresh):
            self._notify()

    def check(self) -> None:
        """`FencedError` unless this process's epoch is the newest and its head may be built on."""
        lineage = self.log.lineage
        if self.epoch is None:
            return
        if lineage.newest_epoch != self.epoch:
            raise FencedError(f"epoch {lineage.newest_epoch} was opened after this trainer's {self.epoch}")
        head = lineage.epoch_head(self.epoch)
        if lineage.quarantined(head):
            raise FencedError(f"version {head} is quarantined; the next trainer opens on a good one", code="quarantined")

    def refusal(self, write_id: str) -> str | None:
        """Why the publisher refused the staged version, if it did."""
        return self._refusals.get(write_id)

    async def read_refusal(self) -> None:
        """Take the last refusal from the stream, in case its hint was missed."""
        message = await self._bus.last(POLICY, self._bus.topology.policy("refused"))
        if message is not None:
            self._take(message.data)

    def next_change(self) -> asyncio.Event:
        """Set when the LOG has grown or a refusal has come, from now on. Take it before looking, then `wait` for it."""
        return self._changed

    async def wait(self, change: asyncio.Event, seconds: float) -> None:
        """Until `change`, at most `seconds`."""
        await pause(change, seconds)

    async def _listen(self) -> None:
        try:
            async for message in self._bus.subscribe_hints("opened", "committed", "refused"):
                if isinstance(message, Refused):
                    self._refusals[message.write_id] = message.reason
                    self._notify()
                self._wake.set()
        except TowlineError as error:  # without hints the poll finds the same, a little later
            log_line.warning("no hints", reason=error.message)

    def _take(self, data: bytes) -> None:
        message = decode_policy(data)
        if isinstance(message, Refused):
            self._refusals[message.write_id] = message.reason

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def pause(event: asyncio.Event, seconds: float) -> None:
    """Until `event`, at most `seconds`. Not `wait_for`, which loses a cancellation that comes together with the event."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks and wait for their ends; their errors don't matter any more."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        # Again and again: a library may swallow a cancellation.
        _, left = await asyncio.wait(left, timeout=CANCEL_SECONDS)
    for task in tasks:
        if not task.cancelled():
            task.exception()
