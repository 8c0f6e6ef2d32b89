"""What stands of a request under an Idempotency-Key, so that its repeat gets the same answer, whoever has died meanwhile.

One KV entry a key, created before any work and replaced (by revision) before anything is sent. A repeat takes it over: from then
on nothing of an earlier attempt can be written, and so sent, any more. Whole answers and long parts lie in the object store.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Sequence
from typing import Literal

import msgspec
import structlog

from towline.bus.client import Bus
from towline.bus.topology import IDEMPOTENCY
from towline.contract.arrays import Array, unpack
from towline.contract.codec import SCHEMA, decode, digest, encode
from towline.contract.serve import pack_logprobs
from towline.contract.task import VersionSpan, pack_tokens
from towline.errors import MissingError, UnavailableError
from towline.gateway.samples import Sample
from towline.store.objects import ObjectStore

INLINE_TOKENS = 1024
"""Of all samples together: more are put into the object store, a part at a time."""
_SMALL_TOKENS = 16
"""What a whole answer may leave in its entry: the bucket is small, and an entry stays for a day."""
KEPT_SECONDS = 2 * (IDEMPOTENCY.ttl_seconds or 86400.0)
"""Objects outlive their entries; older ones are deleted."""
_log = structlog.get_logger("towline.gateway")


class OtherBody(Exception):
    """The key was used with another request."""


class TakenOver(Exception):
    """A later request with the key goes on with it."""


class _Part(msgspec.Struct, frozen=True, array_like=True):
    tokens: Array
    logprobs: Array


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One sample: the parts in the store (their names), then `tail`."""

    parts: tuple[bytes, ...] = ()
    tail: _Part | None = None
    spans: tuple[VersionSpan, ...] = ()
    finish: Literal["stop", "length", "superseded"] | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    body: bytes
    """Digest of the route and the request's body."""
    attempt: int = 0
    save: int = 0
    """Counts the writes, so that no two are the same bytes."""
    name: str
    created: int
    seed: int
    prompts: bytes
    """Names the prompts' tokens in the store: a template that prints the date would render others later."""
    samples: tuple[_Kept, ...] = ()


_record = msgspec.msgpack.Decoder(Record)
_prompts = msgspec.msgpack.Decoder(tuple[Array, ...])
_part = msgspec.msgpack.Decoder(_Part)


class Held:
    """A key that this attempt has. `samples` is what stood; `save` keeps what stands now."""

    def __init__(self, ledger: Ledger, key: str, record: Record, revision: int) -> None:
        self._ledger, self._key, self.record, self._revision = ledger, key, record, revision
        self._stored: dict[int, tuple[tuple[bytes, ...], int]] = {}
        self.samples: list[Sample] = []

    async def load(self) -> None:
        for index, kept in enumerate(self.record.samples):
            sample = Sample(spans=list(kept.spans), finish=kept.finish)
            for name in kept.parts:
                self._read(sample, _part.decode(await self._ledger.get(name)))
            self._stored[index] = (kept.parts, len(sample.tokens))
            if kept.tail is not None:
                self._read(sample, kept.tail)
            self.samples.append(sample)

    async def prompts(self) -> list[list[int]]:
        packed = _prompts.decode(await self._ledger.get(self.record.prompts))
        return [unpack(one, "<i4", "prompt").tolist() for one in packed]

    async def save(self, samples: Sequence[Sample]) -> None:
        """`TakenOver` where a later attempt has the key; then nothing may be sent."""
        limit = max(INLINE_TOKENS // max(len(samples), 1), 16)
        kept = []
        for index, sample in enumerate(samples):
            parts, stored = self._stored.get(index, ((), 0))
            tokens, logprobs = sample.tokens[stored:], sample.logprobs[stored:]
            spans, finish = tuple(sample.spans), sample.finish  # now: more tokens may come while a part is put away
            tail: _Part | None = _Part(pack_tokens(tokens), pack_logprobs(logprobs))
            if len(tokens) > limit or (finish is not None and len(tokens) > _SMALL_TOKENS):
                parts, tail = (*parts, await self._ledger.put(msgspec.msgpack.encode(tail))), None
                self._stored[index] = (parts, stored + len(tokens))
            kept.append(_Kept(parts=parts, tail=tail, spans=spans, finish=finish))
        record = msgspec.structs.replace(self.record, samples=tuple(kept), save=self.record.save + 1)
        revision = await self._ledger.bucket.update(self._key, encode(record), self._revision)
        if revision is None:
            raise TakenOver
        self.record, self._revision = record, revision

    def _read(self, sample: Sample, part: _Part) -> None:
        sample.tokens += unpack(part.tokens, "<i4", "tokens").tolist()
        sample.logprobs += unpack(part.logprobs, "<f4", "logprobs").tolist()


class Ledger:
    """All keys of a run. `take` one before any work."""

    def __init__(self, bus: Bus, objects: ObjectStore, run: str) -> None:
        self.bucket = bus.kv(IDEMPOTENCY)
        self._objects, self._prefix = objects, f"{run}/idempotency/"

    async def take(
        self, tenant: str, key: str, body: bytes, *, name: str, created: int, seed: int, prompts: list[list[int]]
    ) -> Held:
        """The key's record, made now or taken over from an earlier attempt. `OtherBody` where it is another request's."""
        place = hashlib.sha256(f"{tenant}\0{key}".encode()).hexdigest()[:40]
        stored: bytes | None = None
        while True:
            entry = await self.bucket.entry(place)
            if entry is None:
                if stored is None:
                    stored = await self.put(msgspec.msgpack.encode(tuple(pack_tokens(prompt) for prompt in prompts)))
                record = Record(body=digest(body), name=name, created=created, seed=seed, prompts=stored)
                revision = await self.bucket.create(place, encode(record))
            else:
                standing = decode(_record, entry[0], "idempotency record")
                if standing.body != digest(body):
                    raise OtherBody
                record = msgspec.structs.replace(standing, attempt=standing.attempt + 1, save=standing.save + 1)
                revision = await self.bucket.update(place, encode(record), entry[1])
            if revision is not None:
                held = Held(self, place, record, revision)
                await held.load()
                return held

    async def put(self, data: bytes) -> bytes:
        """Under a name of its own, so that it is as old as what names it."""
        name = secrets.token_bytes(16)
        await asyncio.to_thread(self._objects.put, self._prefix + name.hex(), data)
        return name

    async def get(self, name: bytes) -> bytes:
        try:
            return await asyncio.to_thread(self._objects.get, self._prefix + name.hex())
        except MissingError as error:
            raise UnavailableError(
                f"a part of an answer under an Idempotency-Key is gone: {error.message}; use a new key", code="idempotency_gone"
            ) from error

    def sweep(self, now: float | None = None) -> int:
        """Delete objects whose entries have expired; how many."""
        edge = (time.time() if now is None else now) - KEPT_SECONDS
        old = [info.key for info in self._objects.list(self._prefix) if info.modified < edge]
        for key in old:
            self._objects.delete(key)
        return len(old)
