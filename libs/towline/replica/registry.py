"""What a replica says of itself: its entry in the registry, renewed before it expires, and an ack for each served version."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import Literal

import structlog
from msgspec import UNSET, UnsetType

from towline.bus.across import Across
from towline.bus.client import Bus
from towline.bus.topology import ACKS, REGISTRY_TTL_SECONDS, REPLICAS
from towline.contract.codec import encode
from towline.contract.policy import Ack, ReplicaInfo, decode_replica
from towline.engine.base import Engine, recovering
from towline.errors import MalformedError, UnavailableError, UsageError
from towline.replica.states import StateMachine

RENEW_SECONDS = REGISTRY_TTL_SECONDS / 3
_log = structlog.get_logger(__name__)


class Registry:
    """Publishes the entry of `replica`. `version` and `busy` are asked at each renewal."""

    def __init__(
        self,
        bus: Bus,
        *,
        replica: str,
        engine: Engine,
        states: StateMachine,
        version: Callable[[], int | None],
        busy: Callable[[], int],
        subscription: Literal["latest", "pinned", "behind", "canary"],
        failed: Mapping[int, str],
        site: str = "",
    ) -> None:
        self._bus, self._entered = bus, False
        self._replicas, self._acks = bus.kv(REPLICAS), bus.kv(ACKS)
        self._replica, self._engine, self._states = replica, engine, states
        self._version, self._busy, self._subscription, self._failed = version, busy, subscription, failed
        self._wake = asyncio.Event()
        self._host = socket.gethostname()
        self._site = site or UNSET

    def renew(self) -> None:
        """Write the entry soon: something in it has changed."""
        self._wake.set()

    async def run(self) -> None:
        """Renew for ever. A bus that is away is waited out. `UsageError` where another site has a replica of this name."""
        await self._refuse_twin()
        self._entered = True
        while True:
            self._wake.clear()
            try:
                await self._replicas.put(self._replica, encode(self.info()))
            except UnavailableError as error:
                _log.warning("registry_unreachable", reason=error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_SECONDS):
                    await self._wake.wait()

    def info(self) -> ReplicaInfo:
        away = recovering(self._engine)
        return ReplicaInfo(
            replica=self._replica,
            host=self._host,
            engine=self._engine.name,
            slots=self._engine.slots,
            busy=self._busy(),
            state="starting" if away and self._states.state != "draining" else self._states.state,
            version=self._version(),
            detail=away or self._states.detail,
            at=time.time(),
            subscription=self._subscription,
            failed=dict(self._failed),
            site=self._site,
        )

    async def _refuse_twin(self) -> None:
        """Entries and acks of all sites meet under their names at home, so a name that another site has now isn't free here.

        A site whose line is cut can't know; then home's buffer says so later (`replica_twice`).
        """
        topology = self._bus.topology
        if not topology.sites:
            return
        found = [await self._own_entry()]
        if topology.site:
            home = Across(self._bus.connection, self._bus.jetstream.settings.home_domain)
            try:
                bucket = topology.bucket(REPLICAS)
                found.append(await home.last(f"KV_{bucket}", f"$KV.{bucket}.{self._replica}"))
            except UnavailableError as error:
                _log.warning("name_unchecked", replica=self._replica, reason=error.message)
        for value in found:
            with contextlib.suppress(MalformedError):  # a marker of one that left has no data
                other = decode_replica(value or b"")
                if (other.site or "") != topology.site:
                    raise UsageError(
                        f"replica {self._replica} is alive at {_place(other.site)} (host {other.host}): names must differ over "
                        f"all sites; start this one, at {_place(topology.site)}, under another (--replica), or stop that one and "
                        f"wait {REGISTRY_TTL_SECONDS:g} s",
                        code="replica_twice",
                    )

    async def _own_entry(self) -> bytes | None:
        """What stands here under this replica's name."""
        while True:
            try:
                return await self._replicas.get(self._replica)
            except UnavailableError as error:
                _log.warning("registry_unreachable", reason=error.message)
                await asyncio.sleep(RENEW_SECONDS)

    async def acknowledge(self, ack: Ack) -> None:
        """The replica's latest ack. One that can't be written is logged: the next version's takes its place."""
        try:
            await self._acks.put(self._replica, encode(ack))
        except UnavailableError as error:
            _log.warning("ack_unwritten", version=ack.version, reason=error.message)

    async def leave(self) -> None:
        """Take the entry away, if it's this replica's."""
        if not self._entered:
            return
        try:
            await self._replicas.delete(self._replica)
        except UnavailableError as error:
            _log.warning("registry_unreachable", reason=error.message)


def _place(site: str | UnsetType) -> str:
    return f"site {site}" if site else "home"
