"""Whether a site's streams still are what home took in of them, and how home gets what a site made under old numbers.

A nats-server that loses its last writes gives their sequences out again. Home's server ignores what comes under a sequence that
it has had, and confirms it all the same; so home has to look itself. A message of home's that came from a site says its sequence
there: under this one the site must have the same message. Those that are compared are the newest ones, and each one after which
nothing came for a while, as when the site's server was down; what was lost ends with one of these.

Where the site has another message or none, home takes the stream in by a new consumer, which begins after the last message that
both have. What home has twice then is harmless: the first score of a sample stands.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

import structlog

from towline.bus.across import Across
from towline.bus.client import Bus
from towline.bus.origins import Origin, Way, origins, way_of
from towline.bus.sites import renewed_sync, stream_of, sync_names, taken_by, taking_by
from towline.bus.topology import BucketSpec, StreamSpec
from towline.bus.wire import BLOB_HEADER, ApiError, Message
from towline.contract.codec import digest
from towline.errors import InvariantError, MissingError, UnavailableError

QUIET_SECONDS = 1.0
"""A machine that lost its last writes, by a power cut or an older disk, isn't back sooner."""
KEPT = 128
"""Marks of one way, the newest ones. A buffer that begins compares them all, so many messages go over the line."""
IN_FLIGHT = 16
_say = structlog.get_logger("towline.buffer.far")

Spec = StreamSpec | BucketSpec


@dataclass(slots=True)
class Mark:
    """A message of home's that came from a site. `content`: its digest, None until it was looked at for the first time."""

    home: int
    at: float
    origin: Origin
    content: bytes | None = None
    looked_at: bool = False


@dataclass(frozen=True, slots=True)
class Compared:
    """What a look at a site's stream found. `same`: up to here the site has what home took in; no more may be purged."""

    way: Way
    consumer: str
    same: int
    regressed: bool


class Tails:
    """`read` home's stream, then `look` at the site's, each time."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._next: dict[str, int] = {}
        self._marks: dict[tuple[str, str, Way], deque[Mark]] = {}

    async def read(self, spec: Spec) -> None:
        """Take note of what home has taken in since the last time."""
        stream = stream_of(self._bus.topology, spec)
        start = self._next.get(stream, 1)
        try:
            async for message, origin in origins(self._bus.jetstream, stream, self._bus.topology.sites, start=start):
                self.note(stream, message, origin)
        except InvariantError:  # home's stream was lost, and begins anew
            self._next.pop(stream, None)
            self._marks = {key: marks for key, marks in self._marks.items() if key[1] != stream}

    def note(self, stream: str, message: Message, origin: Origin | None) -> None:
        """One of home's messages, in their order; the janitor says what it purges before a `read` has seen it."""
        if message.sequence < self._next.get(stream, 1):
            return
        self._next[stream] = message.sequence + 1
        if origin is None:
            return
        marks = self._marks.setdefault((origin.site, stream, origin.way), deque(maxlen=KEPT))
        mark = Mark(message.sequence, message.at, origin)
        if marks and not marks[-1].looked_at and mark.at - marks[-1].at < QUIET_SECONDS:
            marks.pop()
        marks.append(mark)

    async def look(self, across: Across, spec: Spec) -> Compared | None:
        """After `read`. None where the site hasn't got the stream, or home takes it in as runs of before did."""
        site, stream = across.domain, stream_of(self._bus.topology, spec)
        consumer = taken_by(await self._config(stream), site)
        info = await across.call(f"STREAM.INFO.{stream}")
        if consumer is None or info is None:
            return None
        way, last = way_of(consumer, info["created"]), int(info["state"]["last_seq"])
        marks = self._marks_of(site, stream, way)
        newest = max((mark.origin.sequence for mark in marks if mark.content is not None), default=0)
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def verdict(mark: Mark) -> bool | None:
            if mark.origin.sequence > last:
                return False
            if mark.looked_at and mark.origin.sequence != newest:
                return None
            async with gate:
                return await self._is_same(across, stream, mark)

        verdicts = await asyncio.gather(*(verdict(mark) for mark in marks))
        same = max((mark.origin.sequence for mark, found in zip(marks, verdicts, strict=True) if found), default=0)
        lost = min((mark.origin.sequence for mark, found in zip(marks, verdicts, strict=True) if found is False), default=0)
        if not lost:
            return Compared(way, consumer, same, regressed=False)
        await self._take_in_again(across, stream, consumer, marks, last, lost)
        return Compared(way, consumer, 0, regressed=True)

    def _marks_of(self, site: str, stream: str, way: Way) -> list[Mark]:
        """Oldest first."""
        fitting = (key for key in self._marks if key[:2] == (site, stream) and key[2].fits(way))
        return [mark for key in fitting for mark in self._marks[key]]

    async def _is_same(self, across: Across, stream: str, mark: Mark) -> bool | None:
        """Whether the site has this message under its sequence; None where it has none any more, or that can't be told."""
        if mark.content is None:
            own = await self._bus.jetstream.get_from_leader(stream, {"seq": mark.home})
            mark.content = None if own is None else _content(own)
        there = await across.message(stream, mark.origin.sequence)
        mark.looked_at = True
        if there is None:
            return None
        if mark.content is None:  # home has purged it
            return None if there.subject == mark.origin.subject else False
        return _content(there) == mark.content

    async def _take_in_again(self, across: Across, stream: str, consumer: str, marks: list[Mark], last: int, lost: int) -> None:
        """By a new consumer from the last message on that is known to be the same, before `lost`, which isn't."""
        site, start = across.domain, 1
        for mark in reversed(marks):
            if mark.origin.sequence < lost and mark.origin.sequence <= last and await self._is_same(across, stream, mark):
                start = mark.origin.sequence + 1
                break
        told = {"site": site, "stream": stream, "ends_at": last, "another_under": lost}
        names = sync_names(site)
        for name in names[names.index(consumer) + 1 :] if consumer in names else ():
            if await _begins(across, stream, name, start):
                await self._configure(taking_by(await self._config(stream), site, name))
                _say.error("site_regressed", **told, taken_in_from=start, by=name)
                return
        raise Regressed(
            f"{stream} at {site} lost messages for the {len(names)}th time, and what it makes under their numbers stays there: "
            "give the site another name, and its server an empty disk"
        )

    async def _config(self, stream: str) -> dict[str, Any]:
        try:
            return dict((await self._bus.jetstream.call(f"look at {stream}", f"STREAM.INFO.{stream}"))["config"])
        except ApiError as error:
            raise MissingError(f"look at {stream}: {error}") from None

    async def _configure(self, config: dict[str, Any]) -> None:
        try:
            await self._bus.jetstream.call(f"change {config['name']}", f"STREAM.UPDATE.{config['name']}", config)
        except ApiError as error:
            raise error.translated(f"change {config['name']}") from None


class Regressed(UnavailableError):
    """A site's stream lost messages and can't be taken in anew."""

    default_code = "site_regressed"


async def _begins(across: Across, stream: str, name: str, start: int) -> bool:
    """The consumer is there, nobody has had anything of it, and it begins at `start` or before; made where it isn't."""
    info = await across.call(f"CONSUMER.INFO.{stream}.{name}")
    if info is not None:
        unused = not info["delivered"]["consumer_seq"] and not info.get("num_ack_pending")
        return unused and int(info["config"].get("opt_start_seq", 1)) <= start
    config = renewed_sync(stream, across.domain, name, start)
    await across.call(f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config, "action": "create"})
    return True


def _content(message: Message) -> bytes:
    return digest(f"{message.subject} {message.headers.get(BLOB_HEADER, '')} ".encode() + message.data)
