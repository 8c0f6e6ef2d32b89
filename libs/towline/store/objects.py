"""Named, whole objects with an atomic create-only put: what every log, version, anchor, checkpoint and blob stands on.

Two kinds of store keep the same promises, proved by one test suite: an S3 bucket (`s3.py`) and a folder (`file.py`). They
are synchronous and thread-safe. An object is never seen half-written, and of the writers that `create` one key one wins.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from towline.config import StoreSettings
from towline.errors import ConflictError, MissingError, UnavailableError, UsageError

CHUNK_BYTES = 1 << 20
"""What `stream` yields at a time, at most."""
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_SETTLE_TRIES = 12


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object's key, its size in bytes and the Unix time of its last put, as the store's clock has it."""

    key: str
    size: int
    modified: float


class ObjectStore(Protocol):
    """Keys are relative to the store's URL, `/`-separated, of letters, digits, '.', '_' and '-'.

    Every call may raise `UnavailableError` after bounded retries, `FullError` where there's no room, and `UsageError` where
    the store refuses it (bucket, keys, endpoint, permission).
    """

    @property
    def url(self) -> str:
        """Where it is, without secrets, for messages."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object; `MissingError` if there is none."""
        ...

    def stream(self, key: str) -> Iterator[bytes]:
        """The object in chunks of at most `CHUNK_BYTES`, one and the same object from the first chunk to the last."""
        ...

    def put(self, key: str, data: bytes | Path) -> None:
        """The bytes, or the file's, under `key`, durable on return; replaces what stood there."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """The bytes under `key` where nothing stands: True; False if something does.

        `UnavailableError` with code `reply_lost` leaves open whether it stands: read it back, as `settle` does.
        """
        ...

    def stat(self, key: str) -> ObjectInfo | None:
        """None if there is no such object."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key begins with `prefix`, once; S3 servers differ in the order."""
        ...

    def delete(self, key: str) -> None:
        """Nothing stands there afterwards; no error if nothing did."""
        ...

    def check(self, *, writes: bool = True) -> None:
        """Whether the store can be used at all: one line that names what is wrong.

        With `writes`, also that of two conditional puts the second is refused: without that two writers could both commit.
        """
        ...


def open_store(settings: StoreSettings) -> ObjectStore:
    """The store that `store.url` names; nothing is asked of it yet. `UsageError` for a URL or keys that can't be right."""
    scheme = urlsplit(settings.url).scheme
    if scheme == "s3":
        from towline.store.s3 import S3Store

        return S3Store(settings)
    if scheme == "file":
        from towline.store.file import FileStore

        return FileStore(settings)
    if not settings.url:
        raise UsageError("store.url is empty; give s3://bucket/prefix or file:///path", code="store_url")
    raise UsageError(f"store.url = {settings.url!r}: use s3://bucket/prefix or file:///path", code="store_url")


def checked_key(key: str) -> str:
    """The key, or `UsageError`: so that no key leaves the store's prefix, and both kinds of store take the same ones."""
    if len(key) > 512 or not _KEY.fullmatch(key):
        raise UsageError(f"object key {key!r}: use parts of letters, digits, '.', '_', '-', none that begins with '.' or '-'",
                         code="object_key")  # fmt: skip
    return key


def settle(objects: ObjectStore, key: str, data: bytes) -> bytes:
    """What stands under `key` after an attempt to create it with `data`: these bytes, or those of a writer who was first.

    A lost reply is resolved by reading back. `UnavailableError` leaves it open; calling again settles it.
    """
    wait = 0.05
    for attempt in range(_SETTLE_TRIES):
        try:
            if objects.create(key, data):
                return data
        except UnavailableError as error:
            if error.code != "reply_lost" or attempt + 1 == _SETTLE_TRIES:
                raise
        try:
            return objects.get(key)
        except MissingError:
            time.sleep(wait)
            wait = min(2 * wait, 2.0)
    raise UnavailableError(f"{objects.url}: {key} can be neither created nor read", code="object_unsettled")


def ensure(objects: ObjectStore, key: str, data: bytes) -> None:
    """`data` stands under `key` on return. `ConflictError` where other bytes do: for keys that name their bytes or one writer."""
    if settle(objects, key, data) != data:
        raise ConflictError(f"{objects.url}: {key} holds other bytes than this writer's", code="object_differs")
