"""Wakes everybody who waits, again and again."""

from __future__ import annotations

import asyncio
import contextlib


class Signal:
    """`notify` ends every `wait` that has begun."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_seconds: float | None = None) -> None:
        """Until the next `notify`, or the time is over."""
        event = self._event
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await event.wait()
