"""Entry 0: the model before the first batch, uploaded whole as anchor 0, so that a replica needs the store alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import xxhash

from towline.contract.entries import BaseEntry, LogEntry, Probe
from towline.delta.files import INDEX, load_folder, replacing
from towline.delta.state import ModelState, layout_digest, layout_of, model_digest, tensor_digests
from towline.errors import ConflictError, CorruptError, MissingError
from towline.store import keys
from towline.store.anchors import AnchorRecord, read_anchor, record_anchor, upload_anchor
from towline.store.log import Log
from towline.store.manifest import FileRecord
from towline.store.objects import ObjectStore
from towline.store.transfer import fetch_all, file_record

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot"}


def seed_base(objects: ObjectStore, log: Log, folder: Path, source: str, revision: str | None, probe: Probe | None) -> BaseEntry:
    """Entry 0 of the model in a Hugging Face folder, whose weights are in the published dtype already.

    Idempotent: where entry 0 stands, the model is compared with it and nothing is uploaded; `ConflictError` if it's another.
    """
    others = {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.startswith(".") and path.suffix not in _WEIGHT_SUFFIXES and path.name != INDEX
    }
    return seed_base_state(objects, log, load_folder(folder), others, source, revision, probe)


def seed_base_state(
    objects: ObjectStore,
    log: Log,
    state: ModelState,
    others: Mapping[str, bytes],
    source: str,
    revision: str | None,
    probe: Probe | None,
) -> BaseEntry:
    """As `seed_base`, of a state and the folder's other files (config.json, tokenizer…), file name -> bytes."""
    digests = (layout_digest(layout_of(state)), model_digest(tensor_digests(state)))
    write_id = keys.new_write_id()
    log.refresh()
    anchor: AnchorRecord | None = None
    if not log.next_number:
        anchor = _anchor(objects, log.run, write_id, state, others, digests)

    def build(log: Log) -> LogEntry:
        if log.next_number or anchor is None:
            return log.entry(0)
        return BaseEntry(
            number=0,
            prev=None,
            write_id=write_id,
            at=time.time(),
            source=source,
            revision=revision,
            anchor=anchor.folder,
            layout_digest=anchor.layout_digest,
            model_digest=anchor.model_digest,
            probe=probe,
        )

    entry = log.append(build)
    if not isinstance(entry, BaseEntry):
        raise CorruptError(f"run {log.run}: log entry 0 isn't the base model", code="log_entry")
    _compare(log.run, (entry.layout_digest, entry.model_digest), digests)
    return entry


def base_files(objects: ObjectStore, log: Log) -> dict[str, bytes]:
    """The base model's other files (config.json, tokenizer…), file name -> bytes, verified."""
    record = _record(objects, log)
    return {file.name: data for file, data in fetch_all(objects, record.folder, record.others)}


def fetch_base_folder(objects: ObjectStore, log: Log, folder: Path) -> None:
    """Make `folder` the base model's Hugging Face folder, weights included; files that are right already stay.

    `CorruptError` where the stored files aren't what their digests say; whatever is written under its name is whole.
    """
    record = _record(objects, log)
    folder.mkdir(parents=True, exist_ok=True)
    for file in record.files:
        path = folder / file.name
        if path.is_file() and path.stat().st_size == file.nbytes and file_record(file.name, path) == file:
            continue
        _download(objects, record, file, path)


def _download(objects: ObjectStore, record: AnchorRecord, file: FileRecord, path: Path) -> None:
    hasher = xxhash.xxh3_128()
    with replacing(path) as out:
        for chunk in objects.stream(f"{record.folder}/{file.name}"):
            hasher.update(chunk)
            out.write(chunk)
        if hasher.hexdigest() != file.digest:
            raise CorruptError(f"{objects.url}: {record.folder}/{file.name} isn't what its digest says", code="file_digest")


def _anchor(
    objects: ObjectStore, run: str, write_id: str, state: ModelState, others: Mapping[str, bytes], digests: tuple[str, str]
) -> AnchorRecord:
    try:
        record = read_anchor(objects, run, 0)  # of a trainer that died before entry 0, or that is a little ahead
    except MissingError:
        record = record_anchor(objects, run, upload_anchor(objects, run, 0, write_id, state, others))
    _compare(run, (record.layout_digest, record.model_digest), digests)
    return record


def _compare(run: str, stands: tuple[str, str], ours: tuple[str, str]) -> None:
    if stands != ours:
        what = "layout" if stands[0] != ours[0] else "weights"
        raise ConflictError(f"run {run} began with another model (its {what} differ); give this one another run.name",
                            code="base_differs")  # fmt: skip


def _record(objects: ObjectStore, log: Log) -> AnchorRecord:
    if not log.next_number:
        log.refresh()
    entry, record = log.entry(0), read_anchor(objects, log.run, 0)
    if not isinstance(entry, BaseEntry) or entry.anchor != record.folder or entry.model_digest != record.model_digest:
        raise CorruptError(f"run {log.run}: anchor 0 isn't the one that log entry 0 names", code="anchor")
    return record
