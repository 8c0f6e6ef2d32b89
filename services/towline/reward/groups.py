"""For verifiers that compare: whether all of a group's trajectories are there, and which they are.

What this replica has been given it remembers; the rest it reads from the stream's leader. So of the handlers of a group, the
one whose trajectory was stored last always sees them all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from towline.bus.client import Bus
from towline.bus.topology import TRAJECTORY
from towline.contract.codec import digest
from towline.contract.trajectory import Trajectory, decode_trajectory
from towline.errors import MalformedError

MOST_SAMPLES = 4096
"""Decoded trajectories that are remembered for their group's last sample; the oldest groups go first."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A trajectory, and the name of its bytes in the TRAJECTORY stream."""

    trajectory: Trajectory
    sequence: int
    digest: bytes
    headers: Mapping[str, str]


class Groups:
    """The groups that this replica has met."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: OrderedDict[int, dict[int, Stored]] = OrderedDict()
        self._samples = 0
        self._scored: OrderedDict[int, None] = OrderedDict()
        self._locks: dict[int, asyncio.Lock] = {}

    @contextlib.asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[bool]:
        """One handler of a group at a time; True where the group's scores stand already, by this replica's doing."""
        lock = self._locks.setdefault(number, asyncio.Lock())
        try:
            async with lock:
                yield number in self._scored
        finally:
            if not lock.locked():
                self._locks.pop(number, None)

    async def complete(self, stored: Stored) -> list[Stored] | None:
        """The group's samples in order, or None while one is missing or can't be read (its own handler says so then)."""
        number, size = stored.trajectory.group, stored.trajectory.group_size
        members = {**self._known.get(number, {}), stored.trajectory.sample: stored}
        for index in range(size):
            if index not in members:
                found = await self._look_up(number, index)
                if found is None:
                    return None
                self.remember(number, found)
                members[index] = found
        return [members[index] for index in range(size)]

    def close(self, number: int) -> None:
        """All of the group's scores stand."""
        self._samples -= len(self._known.pop(number, {}))
        self._scored[number] = None
        while len(self._scored) > MOST_SAMPLES:
            self._scored.popitem(last=False)

    async def _look_up(self, number: int, index: int) -> Stored | None:
        message = await self._bus.last(TRAJECTORY, self._bus.topology.trajectory(number, index))
        if message is None:
            return None
        try:
            return Stored(decode_trajectory(message.data), message.sequence, digest(message.data), message.headers)
        except MalformedError:
            return None

    def remember(self, number: int, stored: Stored) -> None:
        """Keep a trajectory for its group's last one."""
        if number in self._scored:
            return
        members = self._known.setdefault(number, {})
        self._known.move_to_end(number)
        self._samples += stored.trajectory.sample not in members
        members[stored.trajectory.sample] = stored
        while self._samples > MOST_SAMPLES and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._samples -= len(oldest)
