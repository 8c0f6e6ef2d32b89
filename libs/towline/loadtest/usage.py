"""Processor time and memory of processes, while something else is measured."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import time
from collections.abc import Callable

import psutil

LOOK_SECONDS = 0.25


class Usage:
    """`run` it; then ask for any stretch of time that it saw."""

    def __init__(self, pids: Callable[[], dict[str, int]]) -> None:
        self._pids = pids
        self._others: dict[str, int] = {}
        self._seen: dict[str, list[tuple[float, float, int]]] = {}

    def also(self, name: str, pid: int) -> None:
        """Look at this process too."""
        self._others[name] = pid

    async def run(self) -> None:
        while True:
            for name, pid in (self._pids() | self._others).items():
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    times = process.cpu_times()
                    self._seen.setdefault(name, []).append((time.time(), times.user + times.system, process.memory_info().rss))
            await asyncio.sleep(LOOK_SECONDS)

    def cpu_seconds(self, prefix: str, begin: float, end: float) -> float:
        """Of the processes whose name begins so, between two Unix times; looks are interpolated."""
        return sum(_at(seen, end) - _at(seen, begin) for name, seen in self._seen.items() if name.startswith(prefix))

    def rss_bytes(self, prefix: str, at: float) -> float:
        """Of the processes whose name begins so, at the last look before a Unix time."""
        return float(
            sum(
                seen[max(bisect.bisect_right(seen, at, key=lambda look: look[0]) - 1, 0)][2]
                for name, seen in self._seen.items()
                if name.startswith(prefix)
            )
        )


def _at(seen: list[tuple[float, float, int]], when: float) -> float:
    place = bisect.bisect_right(seen, when, key=lambda look: look[0])
    if place in (0, len(seen)):
        return seen[min(place, len(seen) - 1)][1]
    (before, low, _), (after, high, _) = seen[place - 1 : place + 1]
    return low + (high - low) * (when - before) / (after - before)
