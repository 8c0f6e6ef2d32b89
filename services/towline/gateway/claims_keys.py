"""Which session was claimed under an Idempotency-Key, so that who lost the answer gets that one and not a second.

One small KV entry a key, which names the session before it's made: a claim that died between the two has made none, and its
repeat claims anew.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

import msgspec

from towline.bus.client import Bus
from towline.bus.topology import SESSIONS
from towline.contract.codec import SCHEMA, decode, digest, encode
from towline.gateway.answers import invalid
from towline.gateway.desk import MOST_KEY_CHARACTERS
from towline.gateway.idempotency import OtherBody, TakenOver


class _Noted(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    body: bytes
    session: str
    write: bytes
    """Random: no two writes are the same bytes."""


_noted = msgspec.msgpack.Decoder(_Noted)


@dataclass(slots=True)
class ClaimKey:
    """One request's key. `session`: what an earlier request with it claimed, or was about to."""

    session: str | None
    _bus: Bus = field(repr=False)
    name: str
    """Its entry in the bucket of sessions."""
    _body: bytes
    _revision: int | None

    @classmethod
    async def read(cls, bus: Bus, tenant: str, key: str, body: bytes) -> ClaimKey:
        """`OtherBody` where it was used with another one."""
        if not 1 <= len(key) <= MOST_KEY_CHARACTERS:
            raise invalid(f"Idempotency-Key: use 1 to {MOST_KEY_CHARACTERS} characters")
        name = f"claim-{hashlib.sha256(f'{tenant}/{key}'.encode()).hexdigest()[:32]}"
        found, mine = await bus.kv(SESSIONS).entry(name), digest(body)
        if found is None:
            return cls(None, bus, name, mine, None)
        noted = decode(_noted, found[0], "claim key")
        if noted.body != mine:
            raise OtherBody
        return cls(noted.session, bus, name, mine, found[1])

    async def note(self, session: str) -> None:
        """Before the session is made; `TakenOver` where another request with the key was first."""
        data = encode(_Noted(body=self._body, session=session, write=secrets.token_bytes(8)))
        bucket = self._bus.kv(SESSIONS)
        if self._revision is None:
            self._revision = await bucket.create(self.name, data)
        else:
            self._revision = await bucket.update(self.name, data, self._revision)
        if self._revision is None:
            raise TakenOver
