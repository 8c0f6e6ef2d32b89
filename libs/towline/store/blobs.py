"""Payloads that are too large for a message, under the digest that names them."""

from __future__ import annotations

from towline.contract.codec import digest
from towline.errors import CorruptError
from towline.store import keys
from towline.store.objects import ObjectStore, ensure


class Blobs:
    """RUN/blobs/DIGEST. Thread-safe, as its store is."""

    def __init__(self, objects: ObjectStore, run: str) -> None:
        self._objects = objects
        self._run = run

    def put(self, data: bytes) -> bytes:
        """Store the payload, durable on return, also where it stood there already; its xxh3-128 digest, 16 bytes."""
        name = digest(data)
        ensure(self._objects, keys.blob(self._run, name), data)
        return name

    def get(self, name: bytes) -> bytes:
        """The payload with this digest: `MissingError` if there is none, `CorruptError` if what's stored has another digest."""
        data = self._objects.get(keys.blob(self._run, name))
        if digest(data) != name:
            raise CorruptError(f"{self._objects.url}: {keys.blob(self._run, name)} isn't what its digest says", code="blob")
        return data
