"""A bundle as a `Source`: a folder that needs neither the bus nor the store that the run had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec

from towline.bundle.frames import StreamFile
from towline.bundle.manifest import BundleManifest, StreamRecord, check_files, read_manifest
from towline.bundle.settings import read_settings
from towline.bundle.source import decode_acks, matcher
from towline.bus.client import Message
from towline.bus.topology import StreamSpec, Topology
from towline.config import Settings, StoreSettings
from towline.contract.policy import Ack
from towline.errors import CorruptError, UsageError
from towline.store.log import Log
from towline.store.objects import ObjectStore, open_store

SETTINGS, ACKS_FILE, STORE, STREAMS = "settings.json", "acks.msgpack", "store", "streams"


def stream_path(folder: Path, spec: StreamSpec) -> Path:
    return folder / STREAMS / f"{spec.key.lower()}.frames"


class BundleSource:
    """An opened bundle, every file checked."""

    def __init__(self, folder: Path, manifest: BundleManifest, settings: Settings, objects: ObjectStore, log: Log) -> None:
        self.folder = folder
        self.manifest = manifest
        self.settings = settings
        self.objects = objects
        self.log = log
        self.topology = Topology(manifest.run)
        self._files: dict[str, StreamFile] = {}

    @classmethod
    def open(cls, folder: Path) -> BundleSource:
        """`UsageError` where it is no bundle, `CorruptError` where a file isn't what the manifest says."""
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        named = {record.name for record in manifest.files}
        streams = [f"{STREAMS}/{key.lower()}.frames" for key in manifest.streams]
        for name in (SETTINGS, ACKS_FILE, *streams):
            if name not in named:
                raise CorruptError(f"{folder}: its manifest names no {name}; export the bundle again", code="bundle_file")
        settings = read_settings((folder / SETTINGS).read_bytes(), str(folder / SETTINGS))
        if settings.run.name != manifest.run:
            raise CorruptError(f"{folder}: the settings are of run {settings.run.name}, not of {manifest.run}", code="bundle_run")
        objects = open_store(StoreSettings(url=(folder / STORE).resolve().as_uri()))
        log = Log(objects, manifest.run)
        log.refresh()
        if log.next_number != manifest.head + 1:
            raise CorruptError(
                f"{folder}: its LOG ends with entry {log.next_number - 1}, and the manifest says {manifest.head}; "
                "export the bundle again",
                code="bundle_log",
            )
        return cls(folder, manifest, settings, objects, log)

    @property
    def where(self) -> str:
        return f"bundle {self.folder}"

    async def read(
        self, spec: StreamSpec, *, start: int = 1, subjects: Sequence[str] | None = None
    ) -> AsyncGenerator[Message, None]:
        matches = matcher(subjects)
        for message in self._file(spec).messages():
            if message.sequence >= start and matches(message.subject):
                yield message

    async def get_many(self, spec: StreamSpec, sequences: Sequence[int]) -> list[Message | None]:
        file = self._file(spec)
        return await asyncio.to_thread(lambda: [file.get(sequence) for sequence in sequences])

    async def last(self, spec: StreamSpec, subject: str) -> Message | None:
        return await asyncio.to_thread(self._file(spec).last, subject)

    async def state(self, spec: StreamSpec) -> StreamRecord:
        self._file(spec)
        return self.manifest.streams[spec.key]

    async def acks(self) -> list[Ack]:
        path = self.folder / ACKS_FILE
        try:
            return decode_acks(msgspec.msgpack.decode(path.read_bytes(), type=list[bytes]))
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise CorruptError(f"{path} can't be read: {error}", code="bundle_acks") from error

    def _file(self, spec: StreamSpec) -> StreamFile:
        if spec.key not in self.manifest.streams:
            raise UsageError(f"{self.where} holds no stream {spec.key}", code="bundle_stream")
        return self._files.setdefault(spec.key, StreamFile(stream_path(self.folder, spec)))
