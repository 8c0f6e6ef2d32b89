"""Leases decide who tries; what a log's compare-and-swap says decides who may.

A lease is a key with a TTL. Whoever holds it renews it; without it a process is on standby. A process that starts again under
its own replica name takes its former lease over at once, since its former self is dead or about to be fenced.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable

import msgspec
import structlog

from towline.bus.client import Bus
from towline.bus.topology import LEASE_TTL_SECONDS, LEASES
from towline.errors import FencedError, UnavailableError

RENEW_SECONDS = LEASE_TTL_SECONDS / 3
STANDBY_POLL_SECONDS = 0.5
_log = structlog.get_logger("towline.lease")


class Holder(msgspec.Struct, frozen=True):
    """A lease's value. `count` makes each write's bytes unique."""

    replica: str
    incarnation: str
    count: int
    at: float


class Lease:
    """`name`'s lease, for the process that calls itself `replica`."""

    def __init__(self, bus: Bus, name: str, replica: str) -> None:
        self.name = name
        self.replica = replica
        self._bucket = bus.kv(LEASES)
        self._incarnation = secrets.token_hex(8)
        self._count = 0
        self._revision: int | None = None

    async def acquire(self, on_standby: Callable[[str], None], on_silence: Callable[[str], None]) -> None:
        """Wait until the lease is held. For each look `on_standby(reason)` is called where it's in other hands, and
        `on_silence(reason)` where the bus didn't say: then this process could not take over."""
        while True:
            try:
                holder = await self._try()
                if self._revision is not None:
                    return
                on_standby(f"standby: {self.name} is held by {holder}")
            except UnavailableError as error:
                on_silence(f"standby: {error.message}")
            await asyncio.sleep(STANDBY_POLL_SECONDS)

    async def keep(self) -> None:
        """Renew it until cancelled. `FencedError` when another holds it. While the bus is away the lease counts as held:
        whoever took it meanwhile is found at the next renewal, and nobody can have written in our name."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            with contextlib.suppress(UnavailableError):
                await self._renew()

    async def release(self) -> None:
        """Give it up, so that a standby needn't wait for its end."""
        revision, self._revision = self._revision, None
        if revision is not None:
            with contextlib.suppress(UnavailableError):
                await self._bucket.delete(self.name, revision)

    async def _try(self) -> str:
        """Take it if it's free or one's own; the holder if it isn't."""
        entry = await self._bucket.entry(self.name)
        if entry is None:
            self._revision = await self._bucket.create(self.name, self._value())
            return "another replica"
        holder = msgspec.json.decode(entry[0], type=Holder)
        if holder.replica == self.replica:
            self._revision = await self._bucket.update(self.name, self._value(), entry[1])
        return holder.replica

    async def _renew(self) -> None:
        assert self._revision is not None
        revision = await self._bucket.update(self.name, self._value(), self._revision)
        if revision is None:
            entry = await self._bucket.entry(self.name)
            if entry is None:  # it ended while the bus was away, and nobody has taken it
                revision = await self._bucket.create(self.name, self._value())
            elif msgspec.json.decode(entry[0], type=Holder).incarnation == self._incarnation:
                revision = entry[1]
        if revision is None:
            self._revision = None
            raise FencedError(f"the lease {self.name} is held by another replica; this one comes back as standby")
        self._revision = revision

    def _value(self) -> bytes:
        self._count += 1
        return msgspec.json.encode(Holder(self.replica, self._incarnation, self._count, time.time()))
