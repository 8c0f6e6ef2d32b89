"""Checkpoints: what a trainer needs to go on exactly where it was. Files first, manifest last; a version's entry names it.

A checkpoint counts only once a committed version names it, since the state it holds is that version's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import xxhash

from towline.contract.codec import SCHEMA
from towline.contract.entries import VersionEntry
from towline.errors import CorruptError, InvariantError
from towline.store import keys
from towline.store.log import Log
from towline.store.manifest import FileRecord
from towline.store.objects import ObjectStore, ensure
from towline.store.transfer import fetch, fetch_all

_UPLOADS = 4


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Where the trainer stood."""

    epoch: int
    base: int
    """The last committed version under the checkpoint's state when it was taken."""
    depth: int
    """Batches in the state; so the version that names the checkpoint has this depth."""
    batch_cursor: int
    """CONTROL sequence of the last of them."""
    step: int
    """Optimiser steps."""
    at: float


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    checkpoint: str
    meta: CheckpointMeta
    files: tuple[FileRecord, ...]


_decoder = msgspec.json.Decoder(_Manifest)


def save(objects: ObjectStore, run: str, name: str, files: Mapping[str, bytes], meta: CheckpointMeta) -> None:
    """Store the files under a fresh `name` (`keys.new_write_id()`); it's there whole or not at all."""
    seal(objects, run, name, save_files(objects, run, name, files), meta)


def save_files(objects: ObjectStore, run: str, name: str, files: Mapping[str, bytes]) -> list[FileRecord]:
    """Some of a checkpoint's files; several writers may each store theirs, side by side, under names of their own."""
    folder = keys.checkpoint_folder(run, name)
    records = [FileRecord(file, len(data), xxhash.xxh3_128_hexdigest(data)) for file, data in sorted(files.items())]
    with ThreadPoolExecutor(_UPLOADS, "towline-checkpoint") as pool:
        for upload in [pool.submit(objects.put, f"{folder}/{file}", data) for file, data in files.items()]:
            upload.result()
    return records


def seal(objects: ObjectStore, run: str, name: str, records: Sequence[FileRecord], meta: CheckpointMeta) -> None:
    """The manifest, once every file is stored: after it the checkpoint is there. `InvariantError` for a file stored twice."""
    names = [record.name for record in records]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvariantError(f"checkpoint file {twice!r} was stored by two ranks; report it as a bug", code="staged_twice")
    files = tuple(sorted(records, key=lambda record: record.name))
    manifest = _Manifest(checkpoint=name, meta=meta, files=files)
    ensure(objects, keys.manifest(keys.checkpoint_folder(run, name)), msgspec.json.encode(manifest))


def exists(objects: ObjectStore, run: str, name: str) -> bool:
    """Whether it's there whole."""
    return objects.stat(keys.manifest(keys.checkpoint_folder(run, name))) is not None


def load(objects: ObjectStore, run: str, name: str) -> tuple[dict[str, bytes], CheckpointMeta]:
    """(file name -> bytes, meta), verified; `MissingError` or `CorruptError` names the file."""
    manifest = _read_manifest(objects, run, name)
    folder = keys.checkpoint_folder(run, name)
    return {file.name: data for file, data in fetch_all(objects, folder, manifest.files)}, manifest.meta


class Files(Mapping[str, bytes]):
    """A checkpoint's files by name, each fetched and verified when it's asked for: a rank reads those that it needs."""

    def __init__(self, objects: ObjectStore, folder: str, files: Sequence[FileRecord]) -> None:
        self._objects = objects
        self._folder = folder
        self._files = {file.name: file for file in files}

    def __getitem__(self, name: str) -> bytes:
        return fetch(self._objects, self._folder, self._files[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def open_files(objects: ObjectStore, run: str, name: str) -> tuple[Files, CheckpointMeta]:
    """Like `load`, without the files' bytes before they are asked for."""
    manifest = _read_manifest(objects, run, name)
    return Files(objects, keys.checkpoint_folder(run, name), manifest.files), manifest.meta


def read_meta(objects: ObjectStore, run: str, name: str) -> CheckpointMeta:
    """Where its trainer stood, without its files; `MissingError` or `CorruptError`."""
    return _read_manifest(objects, run, name).meta


def _read_manifest(objects: ObjectStore, run: str, name: str) -> _Manifest:
    key = keys.manifest(keys.checkpoint_folder(run, name))
    try:
        manifest = _decoder.decode(objects.get(key))
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{objects.url}: {key} can't be read: {error}", code="checkpoint") from error
    if manifest.schema != SCHEMA or manifest.checkpoint != name:
        raise CorruptError(f"{objects.url}: {key} says schema {manifest.schema}, {manifest.checkpoint!r}", code="checkpoint")
    return manifest


def newest_on(log: Log) -> Iterator[tuple[int, str]]:
    """(version, checkpoint) of the line's versions that name one, the newest first. Each step back decodes an entry: whoever
    needs the newest few takes no more."""
    for version in reversed(log.lineage.path()):
        entry = log.entry(version)
        if isinstance(entry, VersionEntry) and entry.checkpoint is not None:
            yield version, entry.checkpoint
