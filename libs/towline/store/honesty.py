"""Whether a store keeps its word on conditional puts: all of Towline's logs stand on one winner for each key.

`objects.check` asks for the simple case at every start of a service. This asks more, once, where a store is set up.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from towline.errors import UnavailableError, UsageError
from towline.store.objects import ObjectStore

RACERS = 4
"""A busy SeaweedFS was measured to take a second for four writers of one key, five for sixteen."""
ROUNDS = 3


def prove(objects: ObjectStore) -> None:
    """Raises `UsageError` (store_lies) where two writers of one key both win, where a refused put changes what stands, where
    what was created isn't read back or listed at once, or where a deleted key can't be created again."""
    objects.check()
    with _scratch(objects) as key:
        for round_number in range(ROUNDS):
            winner = _race(objects, key)
            if objects.get(key) != winner:
                raise _lie(objects, "what is read back isn't what won")
            if objects.create(key, b"late") or objects.get(key) != winner:
                raise _lie(objects, f"a put with If-None-Match was taken, or changed the object, after {round_number + 1} races")
            if key not in {info.key for info in objects.list(key)}:
                raise _lie(objects, "an object that was created isn't listed")
            objects.delete(key)
            if objects.stat(key) is not None:
                raise _lie(objects, "a deleted object is still there")


def _race(objects: ObjectStore, key: str) -> bytes:
    """The bytes of the one writer that won."""
    bodies = [b"writer %d" % number for number in range(RACERS)]

    def attempt(body: bytes) -> bool:
        try:
            return objects.create(key, body)
        except UnavailableError as error:
            if error.code != "reply_lost":
                raise
            return objects.get(key) == body

    with ThreadPoolExecutor(RACERS) as pool:
        winners = [body for body, won in zip(bodies, pool.map(attempt, bodies), strict=True) if won]
    if len(winners) != 1:
        raise _lie(objects, f"of {RACERS} conditional puts of one key {len(winners)} were taken")
    return winners[0]


@contextlib.contextmanager
def _scratch(objects: ObjectStore) -> Iterator[str]:
    """A key that nobody else has."""
    key = f"towline-check-{secrets.token_hex(8)}"
    try:
        yield key
    finally:
        objects.delete(key)


def _lie(objects: ObjectStore, what: str) -> UsageError:
    return UsageError(
        f"{objects.url}: {what}; two writers could both commit: use a store that has conditional puts", code="store_lies"
    )
