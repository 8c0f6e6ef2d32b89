"""Sessions as gateways keep them: a small KV entry, replaced by revision, and what is large behind it as an object in the store.

Whoever has read an entry may replace it, once: of two that read the same one, the second is told so and has changed nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import structlog

from towline.bus.client import Bus
from towline.bus.topology import SESSIONS
from towline.contract.codec import SCHEMA, decode, encode
from towline.contract.outcome import FailureStage
from towline.contract.task import SamplingParams, Task
from towline.errors import ConflictError, MalformedError, MissingError, UnavailableError
from towline.gateway.answers import ApiError
from towline.gateway.routing import Constraint
from towline.store.objects import ObjectStore

INLINE_BYTES = 1024
"""A larger content lies in the object store: the bucket is small."""
LONGEST_SECONDS = SESSIONS.ttl_seconds or 86400.0
SETTLED_SECONDS = 300.0
"""How long a claimed session that is finished or given up still answers who asks again."""
KEPT_SECONDS = 2 * LONGEST_SECONDS
"""Objects outlive their entries; older ones are deleted."""
_ID = re.compile(r"sess-[0-9a-f]{32}")
_READ_TRIES = 5
_log = structlog.get_logger("towline.gateway")


State = Literal["open", "finishing", "finished", "ending", "ended"]
"""A claimed session is `ending` once it's given up, and `ended` when that is told."""


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """What /finish was asked for; `at` (Unix seconds) is when, so that a repeat publishes the very same bytes."""

    name: str
    sample: int
    group_size: int
    reference: dict[str, Any]
    at: float
    node: int | None = None
    """Whose branch; None: the head's."""
    reward: float | None = None
    components: dict[str, float] = {}


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The task that a session is bound to, as far as whoever keeps it needs it. `receipt`: where the lane takes its ack."""

    task_sequence: int
    delivery: int
    receipt: str
    lane: str
    group: int
    sample: int
    key: str = ""
    """The bucket's entry of the Idempotency-Key that it was claimed under, if any."""
    began_on: int | None = None
    """The version of the first token that the policy said on the head's path."""


class End(msgspec.Struct, frozen=True, kw_only=True):
    """Why a claimed session can't be finished any more. `stage` None: the buffer knows already."""

    stage: FailureStage | None
    reason: str


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """`session`: the record that towline.session makes, empty before the first turn; `sampling` and `seed` are the last one's."""

    schema: int = SCHEMA
    created: float
    variables: dict[str, Any] = {}
    tools: list[Any] | None = None
    session: bytes = b""
    sampling: SamplingParams | None = None
    seed: int = 0
    state: State = "open"
    finish: Finish | None = None
    task: Task | None = None
    """Of a claimed session, as is `claim`."""
    claim: Claim | None = None
    min_version: int | None = None
    exact_version: int | None = None
    """What its claim asked for; turns that ask for nothing have it."""
    end: End | None = None

    @property
    def constraint(self) -> Constraint:
        return Constraint(min_version=self.min_version, exact_version=self.exact_version)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """`content`, or in its place the name of an object. `write` is random: no two writes are the same bytes. `state` and `claim`
    are the content's, for who looks over all of them."""

    schema: int = SCHEMA
    tenant: str
    ttl_seconds: float
    expires_at: float
    write: bytes
    content: bytes = b""
    blob: str = ""
    state: State = "open"
    claim: Claim | None = None

    @property
    def written_at(self) -> float:
        return self.expires_at - self.ttl_seconds


_entry = msgspec.msgpack.Decoder(Entry)
_content = msgspec.msgpack.Decoder(Content)


@dataclass(frozen=True, slots=True)
class Held:
    """A session as it was read, or written, at `revision`."""

    id: str
    entry: Entry
    revision: int
    content: Content


class SessionStore:
    """All sessions of a run."""

    def __init__(self, bus: Bus, objects: ObjectStore, run: str) -> None:
        self.bucket = bus.kv(SESSIONS)
        self._objects, self._prefix = objects, f"{run}/sessions/"

    async def create(self, tenant: str, content: Content, ttl_seconds: float, name: str | None = None) -> Held:
        """`ConflictError` where a session of this name stands already."""
        name = f"sess-{secrets.token_hex(16)}" if name is None else name
        entry = await self._entry_of(name, tenant, content, ttl_seconds)
        revision = await self.bucket.create(name, encode(entry))
        if revision is None:
            await self._forget(entry)
            raise ConflictError(f"session {name} exists already: ask again", code="session_exists")
        return Held(name, entry, revision, content)

    async def load(self, name: str, tenant: str) -> Held:
        """404 where the tenant has no such session, or its time is over."""
        held = await self.look(name) if _ID.fullmatch(name) else None
        if held is None or held.entry.tenant != tenant or held.entry.expires_at <= time.time():
            raise missing(name)
        return held

    async def look(self, name: str) -> Held | None:
        """Whosever it is, and also where its time is over."""
        for _ in range(_READ_TRIES):
            found = await self.bucket.entry(name)
            if found is None:
                return None
            entry, revision = decode(_entry, found[0], "session entry"), found[1]
            with contextlib.suppress(MissingError):  # a later write has put another object in its place
                data = await asyncio.to_thread(self._objects.get, self._prefix + entry.blob) if entry.blob else entry.content
                return Held(name, entry, revision, decode(_content, data, "session content"))
        raise UnavailableError(f"session {name}: its content can't be found in the store: ask again", code="session_content")

    async def save(self, held: Held, content: Content) -> Held:
        """The content in place of what `held` has read; 409 where somebody was first. The session's time begins anew."""
        settled = content.claim is not None and content.state in ("finished", "ended")
        seconds = SETTLED_SECONDS if settled else held.entry.ttl_seconds
        entry = await self._entry_of(held.id, held.entry.tenant, content, seconds, aside=settled)
        revision = await self.bucket.update(held.id, encode(entry), held.revision)
        if revision is None:
            await self._forget(entry)
            raise _changed(held)
        await self._forget(held.entry)
        return Held(held.id, entry, revision, content)

    async def delete(self, held: Held) -> None:
        """What `held` has read; 409 where somebody changed it meanwhile, as by finishing it."""
        if not await self.bucket.delete(held.id, held.revision):
            raise _changed(held)
        await self._forget(held.entry)

    async def entries(self) -> dict[str, Entry]:
        """Every session's that can be read, as it stood at some moment of the call."""
        found = {}
        for name, data in (await self.bucket.items()).items():
            if _ID.fullmatch(name):
                try:
                    found[name] = decode(_entry, data, "session entry")
                except MalformedError as error:  # another release's: it has its own time to live
                    _log.warning("session_entry_unreadable", session=name, reason=error.message)
        return found

    async def sweep(self, now: float | None = None) -> int:
        """Delete sessions whose time is over, and objects that no entry can name any more; how many of both. Claimed ones that
        aren't settled are the keeper's."""
        at, gone = time.time() if now is None else now, 0
        for name, seen in (await self.entries()).items():
            if seen.expires_at <= at and (found := await self.bucket.entry(name)) is not None:
                entry = decode(_entry, found[0], "session entry")
                settled = entry.claim is None or entry.state in ("finished", "ended")
                if settled and entry.expires_at <= at and await self.bucket.delete(name, found[1]):
                    await self._forget(entry)
                    gone += 1
        return gone + await asyncio.to_thread(self._sweep_objects, at - KEPT_SECONDS)

    def _sweep_objects(self, edge: float) -> int:
        old = [info.key for info in self._objects.list(self._prefix) if info.modified < edge]
        for key in old:
            self._objects.delete(key)
        return len(old)

    async def drop(self, name: str, seen: Entry) -> None:
        """Delete a settled session, unless it was written since it was `seen`, and the key that it was claimed under."""
        found = await self.bucket.entry(name)
        if found is None or decode(_entry, found[0], "session entry").write != seen.write:
            return
        if await self.bucket.delete(name, found[1]):
            if seen.claim is not None and seen.claim.key:
                await self.bucket.delete(seen.claim.key)
            await self._forget(seen)

    async def _entry_of(self, name: str, tenant: str, content: Content, ttl_seconds: float, *, aside: bool = False) -> Entry:
        """`aside`: the content lies in the object store in any case."""
        data, blob = await asyncio.to_thread(encode, content), ""
        if aside or len(data) > INLINE_BYTES:
            blob = f"{name}-{secrets.token_hex(8)}"
            await asyncio.to_thread(self._objects.put, self._prefix + blob, data)
            data = b""
        return Entry(
            tenant=tenant, ttl_seconds=ttl_seconds, expires_at=time.time() + ttl_seconds, write=secrets.token_bytes(8),
            content=data, blob=blob, state=content.state, claim=content.claim,
        )  # fmt: skip

    async def _forget(self, entry: Entry) -> None:
        """Nothing names its object any more. Where it can't be deleted now, the sweep does it."""
        if entry.blob:
            try:
                await asyncio.to_thread(self._objects.delete, self._prefix + entry.blob)
            except UnavailableError as error:
                _log.warning("session_object_left", object=entry.blob, reason=error.message)


def missing(name: str) -> ApiError:
    return ApiError(404, "session_not_found", f"no session {name[:100]!r}: it never was, was deleted, or its time is over")


def conflict(message: str) -> ApiError:
    return ApiError(409, "SessionConflict", message)


def _changed(held: Held) -> ApiError:
    return conflict(f"session {held.id}: another request changed it meanwhile; nothing of this one is kept, send it again")
