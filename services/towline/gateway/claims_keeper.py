"""Every gateway looks over all claimed sessions, whoever bound them: keeps their tasks from being delivered again, gives up those
whose time is over, and brings to their end those that a gateway's death left half-way. So no claim depends on one gateway's life.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, NoReturn, Protocol

import structlog

from towline.bus.client import Bus
from towline.bus.topology import IN_PROGRESS_SHARE
from towline.errors import MalformedError, UnavailableError
from towline.gateway.answers import ApiError
from towline.gateway.claims import Claims
from towline.gateway.session_store import End, Entry, Held, SessionStore

GRACE_SECONDS = 5.0
"""Whoever marked a session as to be finished or given up is left so long to do it."""
_log = structlog.get_logger("towline.gateway")


class GoesOn(Protocol):
    async def go_on(self, held: Held) -> dict[str, Any]: ...


class Keeper:
    """`run` it, or `look` once."""

    def __init__(self, bus: Bus, store: SessionStore, claims: Claims, finisher: GoesOn, every_seconds: float) -> None:
        self._bus, self._store, self._claims, self._finisher = bus, store, claims, finisher
        self._every = min(every_seconds, claims.ack_wait_seconds * IN_PROGRESS_SHARE)
        self._told: dict[str, float] = {}
        self.open = 0
        """Claimed sessions of all gateways, at the last look: those that are neither finished nor given up."""

    async def run(self) -> NoReturn:
        while True:
            try:
                await self.look()
            except UnavailableError as error:
                _log.warning("claims_not_looked_over", reason=error.message)
            await asyncio.sleep(self._every)

    async def look(self) -> None:
        """Over all of them, once."""
        entries = {name: entry for name, entry in (await self._store.entries()).items() if entry.claim is not None}
        self._told = {name: at for name, at in self._told.items() if name in entries}
        self.open = sum(entry.state not in ("finished", "ended") for entry in entries.values())
        for name, entry in entries.items():
            try:
                await self._look_at(name, entry)
            except ApiError as error:  # it changed meanwhile, or can't be finished: the next look sees what became of it
                _log.info("session_left", session=name, reason=error.message)
            except MalformedError as error:
                _log.error("session_unreadable", session=name, reason=error.message)
                await self._give_up(name, entry, error.message)

    async def _look_at(self, name: str, entry: Entry) -> None:
        now = time.time()
        assert entry.claim is not None
        if entry.state in ("finished", "ended"):
            if entry.expires_at <= now:
                await self._store.drop(name, entry)
            return
        if entry.state == "open":
            end = self._claims.over(entry.claim)
            if end is None and entry.expires_at <= now:
                end = End(stage="abandoned", reason=f"its client left it unchanged for {entry.ttl_seconds:g} s")
            if end is not None:
                await self._end(name, entry, end)
                return
        elif now - entry.written_at > GRACE_SECONDS and (held := await self._current(name, entry)) is not None:
            if entry.state == "finishing":
                await self._finisher.go_on(held)
            else:
                await self._claims.settle(held)
            return
        due = self._told.get(name, 0.0) + self._claims.ack_wait_seconds * IN_PROGRESS_SHARE
        if time.monotonic() >= due - self._every / 2 or name not in self._told:
            await self._bus.in_progress_of(entry.claim.receipt)
            self._told[name] = time.monotonic()

    async def _give_up(self, name: str, entry: Entry, reason: str) -> None:
        """Nobody can make a trajectory of it. One whose content can't be read is left to its group's deadline."""
        with contextlib.suppress(ApiError, MalformedError):
            await self._end(name, entry, End(stage="malformed", reason=reason))

    async def _end(self, name: str, entry: Entry, end: End) -> None:
        if (held := await self._current(name, entry)) is not None:
            await self._claims.end(held, end)

    async def _current(self, name: str, entry: Entry) -> Held | None:
        """The session, unless it was written since it was listed."""
        held = await self._store.look(name)
        return held if held is not None and held.entry.write == entry.write else None
