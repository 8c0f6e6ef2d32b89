"""Whole files to and from a folder of the store, each checked against its record."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from towline.errors import CorruptError
from towline.store.manifest import FileRecord
from towline.store.objects import CHUNK_BYTES, ObjectStore

_DOWNLOADS = 4
"""Files on their way at a time, the one in use included."""


def file_record(name: str, path: Path) -> FileRecord:
    """The record of a local file."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
    return FileRecord(name, path.stat().st_size, hasher.hexdigest())


def fetch(objects: ObjectStore, folder: str, file: FileRecord) -> bytes:
    """The file's bytes: `MissingError` where it isn't there (yet), `CorruptError` where it's another."""
    data = objects.get(f"{folder}/{file.name}")
    if len(data) != file.nbytes or xxhash.xxh3_128_hexdigest(data) != file.digest:
        raise CorruptError(f"{objects.url}: {folder}/{file.name} isn't what its digest says", code="file_digest")
    return data


def fetch_all(objects: ObjectStore, folder: str, files: Sequence[FileRecord]) -> Iterator[tuple[FileRecord, bytes]]:
    """Each file with its bytes, in order, the next ones already on their way."""
    with ThreadPoolExecutor(_DOWNLOADS, "towline-download") as pool:
        waiting: deque[tuple[FileRecord, Future[bytes]]] = deque()
        try:
            for file in files:
                waiting.append((file, pool.submit(fetch, objects, folder, file)))
                if len(waiting) == _DOWNLOADS:
                    first, data = waiting.popleft()
                    yield first, data.result()
            while waiting:
                first, data = waiting.popleft()
                yield first, data.result()
        finally:
            for _, data in waiting:
                data.cancel()
