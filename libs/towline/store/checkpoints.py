"""Checkpoints: what a trainer needs to go on exactly where it was. Files first, manifest last; a version's entry names it.

A checkpoint counts only once a committed version names it, since the state it holds is that version's.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
import xxhash

from towline.contract.codec import SCHEMA
from towline.contract.entries import VersionEntry
from towline.errors import CorruptError
from towline.store import keys
from towline.store.log import Log
from towline.store.manifest import FileRecord
from towline.store.objects import ObjectStore, ensure
from towline.store.transfer import fetch_all

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
    folder = keys.checkpoint_folder(run, name)
    records = [FileRecord(file, len(data), xxhash.xxh3_128_hexdigest(data)) for file, data in sorted(files.items())]
    with ThreadPoolExecutor(_UPLOADS, "towline-checkpoint") as pool:
        for upload in [pool.submit(objects.put, f"{folder}/{file}", data) for file, data in files.items()]:
            upload.result()
    manifest = _Manifest(checkpoint=name, meta=meta, files=tuple(records))
    ensure(objects, keys.manifest(folder), msgspec.json.encode(manifest))


def exists(objects: ObjectStore, run: str, name: str) -> bool:
    """Whether it's there whole."""
    return objects.stat(keys.manifest(keys.checkpoint_folder(run, name))) is not None


def load(objects: ObjectStore, run: str, name: str) -> tuple[dict[str, bytes], CheckpointMeta]:
    """(file name -> bytes, meta), verified; `MissingError` or `CorruptError` names the file."""
    manifest = _read_manifest(objects, run, name)
    folder = keys.checkpoint_folder(run, name)
    return {file.name: data for file, data in fetch_all(objects, folder, manifest.files)}, manifest.meta


def read_meta(objects: ObjectStore, run: str, name: str) -> CheckpointMeta:
    """Where its trainer stood, without its files; `MissingError` or `CorruptError`."""
    return _read_manifest(objects, run, name).meta


def _read_manifest(objects: ObjectStore, run: str, name: str) -> _Manifest:
    key = keys.manifest(keys.checkpoint_folder(run, name))
    try:
        manifest = _decoder.decode(objects.get(key))
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise CorruptError(f"{objects.url}: {key} can't be read: {error}", code="checkpoint") from error
    if manifest.schema != SCHEMA or manifest.checkpoint != name:
        raise CorruptError(f"{objects.url}: {key} says schema {manifest.schema}, {manifest.checkpoint!r}", code="checkpoint")
    return manifest


def newest_on(log: Log) -> list[tuple[int, str]]:
    """(version, checkpoint) of the line's versions that name one, the newest first."""
    entries = ((version, log.entry(version)) for version in reversed(log.lineage.path()))
    return [(v, e.checkpoint) for v, e in entries if isinstance(e, VersionEntry) and e.checkpoint is not None]
