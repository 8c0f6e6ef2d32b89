"""Staging a version: its parts are encoded and uploaded under a WRITE_ID of their own, its manifest last.

Nothing is a version before the publisher's entry; a writer that dies half-way leaves a folder that nobody reads. Reading
versions back stands in `materialize.py`, the base model in `base.py`; both are offered here too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Literal

import msgspec

from towline.delta.codec import EncodedPart, Encoding, allocate, apply, encode
from towline.delta.state import ModelState, RawTensor, TensorSpec, copy_state, layout_digest, layout_of, model_digest
from towline.errors import CorruptError, InvariantError
from towline.store import keys
from towline.store.base import base_files, fetch_base_folder, seed_base, seed_base_state
from towline.store.manifest import FileRecord, Manifest, TensorRecord, VersionFacts, encode_manifest, read_manifest
from towline.store.materialize import materialize
from towline.store.objects import ObjectStore, ensure

__all__ = [
    "Manifest",
    "Shard",
    "VersionFacts",
    "base_files",
    "fetch_base_folder",
    "materialize",
    "read_manifest",
    "seed_base",
    "seed_base_state",
    "write_manifest",
    "write_shard",
    "write_version",
]
_UPLOADS = 4
"""Parts on their way at a time."""


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """What one writer of a version staged: its parts, and the tensors whose final state they lead to."""

    parts: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]
    codec: str
    changed: int
    elements: int
    model_bytes: int
    proved: bool
    encode_seconds: float
    upload_seconds: float


def write_version(
    objects: ObjectStore,
    run: str,
    *,
    epoch: int,
    base: int,
    write_id: str,
    base_state: ModelState | None,
    new_state: Mapping[str, RawTensor],
    facts: VersionFacts,
    mode: str = "default",
    base_digest: str | None = None,
    prove: bool = False,
    threads: int | None = None,
) -> Manifest:
    """Stage `new_state` as a delta on `base_state`, the state of version `base` (None: as a full representation).

    base_digest: the base's model digest, which the parts then record, so that folding them can check that they follow each other.
    prove: decode the encoded bytes onto a copy of the base and compare every digest, which `publisher.verify = "sender"` needs.
    Neither state may change until this returns. May be called again with the same WRITE_ID for the same states and facts.
    """
    shard = write_shard(
        objects, keys.version_folder(run, epoch, base, write_id), None,
        base_state=base_state, new_state=new_state, mode=mode, base_digest=base_digest, prove=prove, threads=threads,
    )  # fmt: skip
    representation: Literal["full", "delta"] = "full" if base_state is None else "delta"
    return write_manifest(
        objects, run, epoch=epoch, base=base, write_id=write_id, shards=[shard], facts=facts, mode=mode,
        representation=representation,
    )  # fmt: skip


def write_shard(
    objects: ObjectStore,
    folder: str,
    number: int | None,
    *,
    base_state: ModelState | None,
    new_state: Mapping[str, RawTensor],
    mode: str = "default",
    base_digest: str | None = None,
    prove: bool = False,
    threads: int | None = None,
) -> Shard:
    """One writer's tensors of a version, encoded and uploaded into its folder; arguments as in `write_version`.

    `number` is the writer's among several (each writes other tensors, side by side), None where it's the only one.
    """
    if not new_state and number is not None:
        return Shard(
            parts=(), tensors=(), codec="same", changed=0, elements=0, model_bytes=0, proved=prove, encode_seconds=0.0,
            upload_seconds=0.0,
        )  # fmt: skip
    encoding = encode(
        base_state, new_state, mode=mode, threads=threads, base_digest=base_digest if base_state is not None else None
    )
    uploads = _Uploads(objects, folder, number)
    with uploads:
        if prove:
            _prove(encoding, uploads, base_state, new_state, threads)
        else:
            for part in encoding:
                uploads.add(part)
        parts = uploads.finish()
    report = encoding.report
    return Shard(
        parts=tuple(parts),
        tensors=tuple(TensorRecord(spec.name, spec.dtype, spec.shape, report.digests[spec.name]) for spec in report.layout),
        codec=report.codec,
        changed=report.changed,
        elements=report.elements,
        model_bytes=report.model_bytes,
        proved=prove,
        encode_seconds=report.seconds,
        upload_seconds=uploads.seconds,
    )


def write_manifest(
    objects: ObjectStore,
    run: str,
    *,
    epoch: int,
    base: int,
    write_id: str,
    shards: Sequence[Shard],
    facts: VersionFacts,
    mode: str = "default",
    representation: Literal["full", "delta"] = "delta",
) -> Manifest:
    """The manifest of what the writers staged, by their numbers; after it the version may be committed.

    `InvariantError` where two writers have the same tensor. The seconds are the slowest writer's.
    """
    records = sorted((record for shard in shards for record in shard.tensors), key=lambda record: record.name)
    for one, other in pairwise(records):
        if one.name == other.name:
            raise InvariantError(f"tensor {one.name!r} was staged by two ranks; report it as a bug", code="staged_twice")
    layout = [TensorSpec(record.name, record.dtype, record.shape) for record in records]
    parts = tuple(part for shard in shards for part in shard.parts)
    elements = sum(shard.elements for shard in shards)
    codecs = {name for shard in shards for name in shard.codec.split("+")}
    manifest = Manifest(
        run=run,
        epoch=epoch,
        base=base,
        write_id=write_id,
        representation=representation,
        mode=mode,
        codec="+".join(sorted(codecs - {"same"})) or "same",
        parts=parts,
        tensors=tuple(records),
        layout_digest=layout_digest(layout),
        model_digest=model_digest({record.name: record.digest for record in records}),
        density=sum(shard.changed for shard in shards) / elements if elements else 0.0,
        wire_bytes=sum(part.nbytes for part in parts),
        model_bytes=sum(shard.model_bytes for shard in shards),
        proved=all(shard.proved for shard in shards),
        encode_seconds=max(shard.encode_seconds for shard in shards),
        upload_seconds=max(shard.upload_seconds for shard in shards),
        facts=facts,
    )
    ensure(objects, keys.manifest(manifest.folder), encode_manifest(manifest))
    return manifest


def _prove(
    encoding: Encoding,
    uploads: _Uploads,
    base_state: ModelState | None,
    new_state: Mapping[str, RawTensor],
    threads: int | None,
) -> None:
    """Upload the parts, and apply the same bytes to a copy of the base."""

    def uploaded() -> Iterator[bytes]:
        for part in encoding:
            uploads.add(part)
            yield part.data

    layout = layout_of(new_state)
    copy = allocate(layout) if base_state is None else copy_state(base_state)
    found = apply(copy, uploaded(), layout=layout, digests=None, threads=threads)
    if found.digests != encoding.report.digests:
        raise InvariantError("the delta's bytes don't lead to the state that was encoded; report it as a bug", code="delta_proof")


class _Uploads:
    """Uploads parts beside their encoding, a few at a time."""

    def __init__(self, objects: ObjectStore, folder: str, shard: int | None) -> None:
        self.seconds = 0.0
        self._objects = objects
        self._folder = folder
        self._shard = shard
        self._pool = ThreadPoolExecutor(_UPLOADS, "towline-upload")
        self._waiting: deque[Future[tuple[FileRecord, float]]] = deque()
        self._done: list[FileRecord] = []

    def __enter__(self) -> _Uploads:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, part: EncodedPart) -> None:
        """Begin to upload the part; waits while enough others are on their way."""
        number = len(self._done) + len(self._waiting)
        if part.name != keys.part_name(number):
            raise CorruptError(f"the encoder named a part {part.name!r} out of turn", code="part_name")
        if len(self._waiting) == _UPLOADS:
            self._take()
        self._waiting.append(self._pool.submit(self._upload, part, keys.part_name(number, self._shard)))

    def finish(self) -> list[FileRecord]:
        """Every part's record in order, all uploaded."""
        while self._waiting:
            self._take()
        return self._done

    def _take(self) -> None:
        record, seconds = self._waiting.popleft().result()
        self._done.append(record)
        self.seconds += seconds

    def _upload(self, part: EncodedPart, name: str) -> tuple[FileRecord, float]:
        began = time.perf_counter()
        self._objects.put(f"{self._folder}/{name}", part.data)
        return FileRecord(name, len(part.data), part.digest), time.perf_counter() - began
