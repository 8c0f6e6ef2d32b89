"""Takes away what workers left of samples that are closed: PARTIALs that nobody goes on from.

A PARTIAL isn't history. A worker empties its own when the sample has its outcome; where a group was dropped, nobody does. It
runs beside the leader, whether the run keeps its history or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from towline.buffer.state import State
from towline.bus.client import Bus
from towline.bus.topology import PARTIAL
from towline.bus.wire import ApiError
from towline.contract.groups import parse_group
from towline.errors import MissingError, UnavailableError

LEFTOVERS_SECONDS = 30.0
"""Between sweeps. A worker that hasn't heard yet may write one more; the next sweep finds it."""


class Leftovers:
    """`run` until cancelled; `sweep` once."""

    def __init__(self, bus: Bus, state: Callable[[], State]) -> None:
        self.purged = 0
        self._bus = bus
        self._state = state
        self._stream = bus.topology.stream(PARTIAL)
        self._say = structlog.get_logger("towline.buffer.leftovers")

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LEFTOVERS_SECONDS)
            try:
                await self.sweep()
            except (UnavailableError, MissingError) as error:
                self._say.warning("sweep_put_off", reason=error.message)

    async def sweep(self) -> int:
        """Purge the PARTIALs of groups that are closed; how many subjects went."""
        subjects = await self._bus.jetstream.subjects(self._stream, self._bus.topology.subject("partial.>"))
        state = self._state()
        gone = 0
        for subject in sorted(subjects):
            if not is_closed(state, self._bus.topology.relative(subject)):
                continue
            try:
                await self._bus.jetstream.call(f"purge {subject}", f"STREAM.PURGE.{self._stream}", {"filter": subject})
            except ApiError as error:
                raise error.translated(f"purge {subject}") from None
            gone += 1
        if gone:
            self.purged += gone
            self._say.info("purged", stream=PARTIAL.key, samples=gone)
        return gone


def is_closed(state: State, relative: str) -> bool:
    """Whether nobody goes on from the PARTIALs of this subject, `partial.GROUP.SAMPLE`."""
    group = parse_group(relative.split(".")[1])
    return group is None or (group not in state.groups and group < state.next_group)
