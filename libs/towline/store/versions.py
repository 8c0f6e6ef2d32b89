"""Staging a version: its parts are encoded and uploaded under a WRITE_ID of their own, its manifest last.

Nothing is a version before the publisher's entry; a writer that dies half-way leaves a folder that nobody reads. Reading
versions back stands in `materialize.py`, the base model in `base.py`; both are offered here too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from towline.delta.codec import EncodedPart, Encoding, allocate, apply, encode
from towline.delta.state import ModelState, RawTensor, copy_state, layout_digest, layout_of, model_digest
from towline.errors import CorruptError, InvariantError
from towline.store import keys
from towline.store.base import base_files, fetch_base_folder, seed_base, seed_base_state
from towline.store.manifest import FileRecord, Manifest, TensorRecord, VersionFacts, encode_manifest, read_manifest
from towline.store.materialize import materialize
from towline.store.objects import ObjectStore, ensure

__all__ = [
    "Manifest",
    "VersionFacts",
    "base_files",
    "fetch_base_folder",
    "materialize",
    "read_manifest",
    "seed_base",
    "seed_base_state",
    "write_version",
]
_UPLOADS = 4
"""Parts on their way at a time."""


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
    encoding = encode(
        base_state, new_state, mode=mode, threads=threads, base_digest=base_digest if base_state is not None else None
    )
    uploads = _Uploads(objects, keys.version_folder(run, epoch, base, write_id))
    with uploads:
        if prove:
            _prove(encoding, uploads, base_state, new_state, threads)
        else:
            for part in encoding:
                uploads.add(part)
        parts = uploads.finish()
    report = encoding.report
    tensors = [TensorRecord(spec.name, spec.dtype, spec.shape, report.digests[spec.name]) for spec in sorted(report.layout)]
    manifest = Manifest(
        run=run,
        epoch=epoch,
        base=base,
        write_id=write_id,
        representation="full" if base_state is None else "delta",
        mode=mode,
        codec=report.codec,
        parts=tuple(parts),
        tensors=tuple(tensors),
        layout_digest=layout_digest(report.layout),
        model_digest=model_digest(report.digests),
        density=report.density,
        wire_bytes=sum(part.nbytes for part in parts),
        model_bytes=report.model_bytes,
        proved=prove,
        encode_seconds=report.seconds,
        upload_seconds=uploads.seconds,
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

    def __init__(self, objects: ObjectStore, folder: str) -> None:
        self.seconds = 0.0
        self._objects = objects
        self._folder = folder
        self._pool = ThreadPoolExecutor(_UPLOADS, "towline-upload")
        self._waiting: deque[Future[tuple[FileRecord, float]]] = deque()
        self._done: list[FileRecord] = []

    def __enter__(self) -> _Uploads:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, part: EncodedPart) -> None:
        """Begin to upload the part; waits while enough others are on their way."""
        if part.name != keys.part_name(len(self._done) + len(self._waiting)):
            raise CorruptError(f"the encoder named a part {part.name!r} out of turn", code="part_name")
        if len(self._waiting) == _UPLOADS:
            self._take()
        self._waiting.append(self._pool.submit(self._upload, part))

    def finish(self) -> list[FileRecord]:
        """Every part's record in order, all uploaded."""
        while self._waiting:
            self._take()
        return self._done

    def _take(self) -> None:
        record, seconds = self._waiting.popleft().result()
        self._done.append(record)
        self.seconds += seconds

    def _upload(self, part: EncodedPart) -> tuple[FileRecord, float]:
        began = time.perf_counter()
        self._objects.put(f"{self._folder}/{part.name}", part.data)
        return FileRecord(part.name, len(part.data), part.digest), time.perf_counter() - began
