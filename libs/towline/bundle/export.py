"""A run as a bundle: streams, LOG, base model, versions and settings in one folder, sealed by its manifest.

The LOG was read first, then CONTROL, OUTCOME and TRAJECTORY: of a live run, each holds all that the ones before it name. The
folder is made under another name and renamed when it's whole. BUNDLE.md has the format.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version as installed
from pathlib import Path

import msgspec

from towline.bundle.folder import ACKS_FILE, SETTINGS, STORE, STREAMS, stream_path
from towline.bundle.frames import write_message
from towline.bundle.line import checkpoint_of, read_batches, replay_start
from towline.bundle.manifest import BundleManifest, StreamRecord, list_files, write_manifest
from towline.bundle.parquet import write_parquet
from towline.bundle.settings import portable_json
from towline.bundle.source import Source
from towline.bus.topology import CONTROL, DEAD, OUTCOME, TRAJECTORY, StreamSpec
from towline.contract.codec import encode
from towline.contract.entries import BaseEntry, LogEntry, OpenEntry, VersionEntry
from towline.errors import MissingError, UsageError
from towline.store import checkpoints as stored_checkpoints
from towline.store import keys
from towline.store.anchors import read_anchor
from towline.store.manifest import FileRecord
from towline.store.objects import checked_key

EXPORTED = (CONTROL, OUTCOME, TRAJECTORY, DEAD)
"""In this order: what comes later holds what the earlier ones name."""
_DOWNLOADS = 8
"""Entries whose objects are on their way at a time."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """A finished bundle: `digest` is the sha256 of its manifest."""

    folder: Path
    digest: str
    manifest: BundleManifest


@dataclass(slots=True)
class _Copy:
    """Objects of the run's store on their way into the bundle."""

    source: Source
    root: Path
    left_out: list[str] = field(default_factory=list)

    def take(self, key: str) -> None:
        """The object, streamed; `MissingError` if there is none."""
        path = self.root / checked_key(key)  # the names in a manifest are somebody else's
        path.parent.mkdir(parents=True, exist_ok=True)
        chunks = self.source.objects.stream(key)
        try:
            with path.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
        except MissingError:
            path.unlink(missing_ok=True)
            raise

    def try_all(self, what: str, wanted: Iterable[str]) -> bool:
        """Each object, or a line that says what isn't there any more."""
        try:
            for key in wanted:
                self.take(key)
        except MissingError:
            self.left_out.append(f"{what}: gone from the store")
            return False
        return True


async def export(
    source: Source,
    target: Path,
    *,
    checkpoints: Iterable[int] = (),
    deltas: bool = True,
    parquet: bool = False,
    tell: Tell = lambda line: None,
) -> Exported:
    """Write the bundle `target`, which mustn't exist yet.

    checkpoints: versions whose checkpoint goes in beside the one that a replay needs (none, where it can start at entry 0).
    deltas: the versions' parts too, which show by how much a replay differs. parquet: trajectories and outcomes as tables, too.
    """
    if await asyncio.to_thread(target.exists):
        raise UsageError(f"{target} exists; give another folder, or remove it", code="bundle_exists")
    if not source.log.next_number:
        raise UsageError(f"{source.where} has no LOG yet: nothing can be exported", code="log_empty")
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f".{target.name}.{keys.new_write_id()[:8]}.part")
    folder.mkdir()
    try:
        exported = await _fill(source, folder, tuple(checkpoints), deltas, parquet, tell)
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Exported(target, exported.digest, exported.manifest)


async def _fill(source: Source, folder: Path, checkpoints: tuple[int, ...], deltas: bool, parquet: bool, tell: Tell) -> Exported:
    (folder / SETTINGS).write_bytes(portable_json(source.settings))
    (folder / STREAMS).mkdir()
    streams = {}
    for spec in EXPORTED:
        streams[spec.key] = await _stream(source, spec, stream_path(folder, spec))
        tell(f"{spec.key}: {streams[spec.key].messages} messages")
    (folder / ACKS_FILE).write_bytes(msgspec.msgpack.encode([encode(ack) for ack in await source.acks()]))
    batches, run = await read_batches(source), source.settings.run.name
    start = await asyncio.to_thread(
        replay_start,
        source.log,
        batches,
        streams[TRAJECTORY.key].first,
        lambda name: stored_checkpoints.exists(source.objects, run, name),
    )
    wanted = {*checkpoints, *([start] if start else [])}
    copy = _Copy(source, folder / STORE)
    named = await asyncio.to_thread(_objects, copy, sorted(wanted), deltas, tell)
    if start is None:
        copy.left_out.append("a start for replays: the line's last batches are gone from the streams, and no checkpoint follows")
    if parquet:
        await asyncio.to_thread(write_parquet, folder, source.settings.run.name)
    manifest = BundleManifest(
        run=source.settings.run.name,
        towline=installed("towline"),
        exported_at=time.time(),
        head=source.log.next_number - 1,
        checkpoints=named,
        left_out=tuple(copy.left_out),
        streams=streams,
        files=await asyncio.to_thread(list_files, folder),
    )
    return Exported(folder, write_manifest(folder, manifest), manifest)


async def _stream(source: Source, spec: StreamSpec, path: Path) -> StreamRecord:
    first = last = count = 0
    created_at = (await source.state(spec)).created_at
    with path.open("wb") as file:
        async for message in source.read(spec):
            write_message(file, message)
            first, last, count = first or message.sequence, message.sequence, count + 1
    return StreamRecord(created_at=created_at, first=first, last=last, messages=count)


def _objects(copy: _Copy, checkpoints: list[int], deltas: bool, tell: Tell) -> tuple[str, ...]:
    """LOG, base model, versions, fingerprints; the names of the checkpoints that went in."""
    source, run = copy.source, copy.source.settings.run.name
    log, objects = source.log, source.objects

    def take(entry: LogEntry) -> None:
        copy.take(keys.log_entry(run, entry.number))
        if isinstance(entry, BaseEntry):
            anchor = read_anchor(objects, run, 0)
            copy.take(keys.anchor_record(run, 0))
            for file in anchor.files:
                copy.take(f"{anchor.folder}/{file.name}")
        elif isinstance(entry, OpenEntry):
            copy.try_all(f"fingerprint of epoch {entry.number}", [keys.fingerprint(run, entry.number)])
        elif isinstance(entry, VersionEntry):
            _version(copy, entry, deltas)

    with ThreadPoolExecutor(_DOWNLOADS, "towline-export") as pool:
        for _ in pool.map(take, log.entries()):
            pass
    copy.left_out.sort()
    if not deltas:
        copy.left_out.append("the versions' parts: not wanted")
    tell(f"LOG: {log.next_number} entries")
    named = []
    for version in checkpoints:
        name = checkpoint_of(log, version)
        if name is None:
            continue
        base = keys.checkpoint_folder(run, name)
        files = msgspec.json.decode(objects.get(keys.manifest(base)), type=_CheckpointFiles).files
        for file in files:
            copy.take(f"{base}/{file.name}")
        copy.take(keys.manifest(base))
        named.append(name)
    return tuple(named)


class _CheckpointFiles(msgspec.Struct):
    files: tuple[FileRecord, ...]


def _version(copy: _Copy, entry: VersionEntry, deltas: bool) -> None:
    """Its manifest (every tensor's digest) in any case, and its parts."""
    if not copy.try_all(f"version {entry.number}", [keys.manifest(entry.folder)]):
        return
    if deltas:
        manifest = msgspec.json.decode((copy.root / keys.manifest(entry.folder)).read_bytes(), type=_Parts)
        copy.try_all(f"version {entry.number}'s parts", [f"{entry.folder}/{part.name}" for part in manifest.parts])


class _Parts(msgspec.Struct):
    parts: tuple[FileRecord, ...]
