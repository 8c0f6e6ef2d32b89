"""What a gateway knows of the replicas: the registry, polled, and at once what their doors' answers say."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog

from towline.bus.client import Bus
from towline.bus.topology import REPLICAS
from towline.contract.policy import ReplicaInfo, decode_replica
from towline.contract.serve import ServeChunk
from towline.errors import MalformedError, UnavailableError
from towline.gateway.routing import Candidate, Constraint, Prefixes, order
from towline.replica.following import Following
from towline.store.lineage import Lineage
from towline.store.log import Log
from towline.store.objects import ObjectStore

POLL_SECONDS = 0.25
DOWN_SECONDS = 5.0
"""A replica whose door was silent isn't asked again for so long, unless it says something new in the registry."""
_log = structlog.get_logger("towline.gateway")


@dataclass(slots=True)
class _Known:
    info: ReplicaInfo
    version: int | None
    foreign: int
    """Slots that others take there, and their requests that wait, as it last said."""
    mine: int = 0
    """Requests of this gateway that are there, or on their way."""
    taken: int = 0
    """Of those: what its door has taken, and so counts."""
    down_until: float = 0.0


class Fleet:
    """`run` it; `changed` is called when what may serve has changed."""

    def __init__(self, bus: Bus, objects: ObjectStore, run: str, poll_seconds: float) -> None:
        self.prefixes = Prefixes()
        self.bus_heard = False
        """The registry has been read once."""
        self._bus = bus
        self.started_at = time.time()
        self.log = Log(objects, run)
        self._following = Following(bus, self.log, poll_seconds=poll_seconds, on_entries=lambda _: self._tell())
        self._known: dict[str, _Known] = {}
        self._waiters: set[asyncio.Event] = set()
        self._listing = asyncio.Lock()
        self._listed_at = 0.0

    @property
    def lineage(self) -> Lineage:
        return self.log.lineage

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._following.read_log())
            group.create_task(self._following.hear_hints())
            group.create_task(self._poll())

    def candidates(self) -> list[Candidate]:
        now = time.monotonic()
        return [
            Candidate(
                name=name, version=one.version, slots=one.info.slots, load=one.foreign + one.mine,
                usable=one.version is not None and one.info.state not in ("draining", "starting") and one.down_until <= now,
                pinned=one.info.subscription == "pinned",
            )
            for name, one in self._known.items()
        ]  # fmt: skip

    def best(self, constraint: Constraint, prompt: list[int], session: str | None, tried: set[str]) -> str | None:
        """The replica to ask next; None: there is none left."""
        favourite = self.prefixes.favourite(prompt, session)
        fit = order(self.candidates(), constraint, self.lineage, favourite)
        return next((one.name for one in fit if one.name not in tried), None)

    def versions(self) -> dict[int, int]:
        """Version -> how many usable replicas serve it."""
        found: dict[int, int] = {}
        for one in self.candidates():
            if one.usable and one.version is not None:
                found[one.version] = found.get(one.version, 0) + 1
        return dict(sorted(found.items()))

    def met(self, constraint: Constraint) -> bool:
        """Whether a version is served that the constraint accepts."""
        return any(constraint.met_by(self.lineage, version) for version in self.versions())

    def applied(self) -> int | None:
        """The newest version, by depth on the line, that is served."""
        served = [version for version in self.versions() if version in self.lineage]
        return max(served, key=lambda version: (self.lineage.on_line(version), self.lineage.depth(version)), default=None)

    async def wait(self, seconds: float) -> None:
        """Until something changes, or the time is over."""
        event = asyncio.Event()
        self._waiters.add(event)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await event.wait()
        finally:
            self._waiters.discard(event)

    # What the calls learn

    @contextlib.contextmanager
    def visit(self, replica: str, prompt: list[int], session: str | None) -> Iterator[Callable[[ServeChunk], None]]:
        """While a request is there; what is yielded is told of each chunk that comes from there."""
        self.prefixes.note(prompt, session, replica)
        one = self._known.get(replica)
        counted = False

        def hear(chunk: ServeChunk) -> None:
            nonlocal counted
            if one is None:
                return
            if not counted:
                counted = True
                one.taken += 1
            one.foreign = max(chunk.busy - one.taken, 0)
            self.heard(replica, chunk.applied)

        if one is not None:
            one.mine += 1
        try:
            yield hear
        finally:
            if one is not None:
                one.mine -= 1
                one.taken -= counted

    def heard(self, replica: str, version: int | None) -> None:
        """Which version a door says it advertises."""
        if (one := self._known.get(replica)) is not None and version != one.version:
            one.version = version
            self._tell()

    def down(self, replica: str) -> None:
        """Its door is silent, or it stops."""
        if (one := self._known.get(replica)) is not None:
            one.down_until = time.monotonic() + DOWN_SECONDS

    # The registry

    async def refresh(self) -> None:
        """The registry as it is now, or a moment later; callers share a listing. A bus that is away changes nothing."""
        asked = time.monotonic()
        async with self._listing:
            if self._listed_at < asked:
                began = time.monotonic()
                try:
                    self._take(await self._bus.kv(REPLICAS).items())
                except UnavailableError as error:
                    _log.warning("registry_unreachable", reason=error.message)
                self._listed_at = began

    async def _poll(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(POLL_SECONDS)

    def _take(self, items: dict[str, bytes]) -> None:
        found: dict[str, ReplicaInfo] = {}
        for name, data in items.items():
            with contextlib.suppress(MalformedError):
                found[name] = decode_replica(data)
        changed = not self.bus_heard
        self.bus_heard = True
        for name in set(self._known) - set(found):
            del self._known[name]
            changed = True
        for name, info in found.items():
            one = self._known.get(name)
            if one is None or (info.version is None and one.version is not None):  # new, or a new process
                self._known[name] = _Known(info, info.version, info.busy)
                changed = True
            if one is None:
                continue
            if info.at != one.info.at:
                changed |= info.version != one.version or info.state != one.info.state
                one.info, one.version, one.foreign = info, info.version, max(info.busy - one.taken, 0)
        if changed:
            self._tell()

    def _tell(self) -> None:
        for event in self._waiters:
            event.set()
