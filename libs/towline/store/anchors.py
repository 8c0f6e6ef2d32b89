"""Anchors: a version's whole state as safetensors files, a second representation that a reader may start from.

The files lie in RUN/anchors/NUMBER/WRITE_ID/; RUN/anchors/NUMBER.json is created last and names them with their digests. Anchor
0 is the base model, a whole Hugging Face folder. Anchors are written behind the commits, and are never versions of their own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import xxhash

from towline.contract.codec import SCHEMA
from towline.delta.files import INDEX, SINGLE, read_safetensors, write_safetensors
from towline.delta.state import ModelState, RawTensor, layout_digest, layout_of, model_digest, tensor_digests
from towline.errors import CorruptError, MissingError
from towline.store import keys
from towline.store.manifest import FileRecord
from towline.store.objects import ObjectStore, settle
from towline.store.transfer import fetch_all, file_record

SHARD_BYTES = 512 << 20
"""A shard holds one tensor, or several up to this."""
_WEIGHTS = ".safetensors"


class AnchorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An anchor that is there whole."""

    schema: int = SCHEMA
    version: int
    write_id: str
    folder: str
    files: tuple[FileRecord, ...]
    layout_digest: str
    model_digest: str

    @property
    def weights(self) -> list[FileRecord]:
        return [file for file in self.files if file.name.endswith(_WEIGHTS)]

    @property
    def others(self) -> list[FileRecord]:
        """config.json, the tokenizer's files and the like: anchor 0 alone has them."""
        return [file for file in self.files if not file.name.endswith(_WEIGHTS) and file.name != INDEX]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.weights)


_decoder = msgspec.json.Decoder(AnchorRecord)


def upload_anchor(
    objects: ObjectStore,
    run: str,
    version: int,
    write_id: str,
    state: Mapping[str, RawTensor],
    others: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> AnchorRecord:
    """Upload a Hugging Face folder of the state's weights and the `others`; nothing sees it before `record_anchor`.

    Needs room for one shard in the folder for temporary files.
    """
    folder = keys.anchor_folder(run, version, write_id)
    files: list[FileRecord] = []
    shards = list(_shards(state, shard_bytes))
    where: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="towline-anchor-") as scratch:
        for number, names in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            path = Path(scratch) / name
            write_safetensors({tensor: state[tensor] for tensor in names}, path, {"format": "pt"})
            objects.put(f"{folder}/{name}", path)
            files.append(file_record(name, path))
            path.unlink()
            where.update(dict.fromkeys(names, name))
    small = dict(others or {})
    if len(shards) > 1:
        total = sum(tensor.spec.nbytes for tensor in state.values())
        small[INDEX] = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2).encode()
    for name, data in sorted(small.items()):
        objects.put(f"{folder}/{name}", data)
        files.append(FileRecord(name, len(data), xxhash.xxh3_128_hexdigest(data)))
    return AnchorRecord(
        version=version,
        write_id=write_id,
        folder=folder,
        files=tuple(files),
        layout_digest=layout_digest(layout_of(state)),
        model_digest=model_digest(tensor_digests(state)),
    )


def record_anchor(objects: ObjectStore, run: str, record: AnchorRecord) -> AnchorRecord:
    """Create the record, and return the one that stands: this one, or that of a writer who was first."""
    key = keys.anchor_record(run, record.version)
    return _decode(objects, key, settle(objects, key, msgspec.json.encode(record)), record.version)


def read_anchor(objects: ObjectStore, run: str, version: int) -> AnchorRecord:
    """`MissingError` if the version has none, `CorruptError` if the record can't be right."""
    key = keys.anchor_record(run, version)
    return _decode(objects, key, objects.get(key), version)


def _decode(objects: ObjectStore, key: str, data: bytes, version: int) -> AnchorRecord:
    try:
        record = _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{objects.url}: {key} can't be read: {error}", code="anchor") from error
    if record.schema != SCHEMA or record.version != version:
        raise CorruptError(f"{objects.url}: {key} says schema {record.schema}, version {record.version}", code="anchor")
    return record


def has_anchor(objects: ObjectStore, run: str, version: int) -> bool:
    return objects.stat(keys.anchor_record(run, version)) is not None


def anchored(objects: ObjectStore, run: str) -> list[int]:
    """The versions that have an anchor, as the store lists them: slower than the hint, and complete."""
    prefix = keys.anchors_folder(run)
    names = [info.key.removeprefix(prefix).removesuffix(".json") for info in objects.list(prefix)]
    return sorted(int(name) for name in names if name.isdigit())


def load_anchor(objects: ObjectStore, record: AnchorRecord) -> ModelState:
    """The anchor's state, in memory of its own and writable; `CorruptError` names the file or the tensor that is wrong."""
    state: ModelState = {}
    for file, data in fetch_all(objects, record.folder, record.weights):
        for name, tensor in read_safetensors(data).items():
            if name in state:
                raise CorruptError(
                    f"tensor {name!r} stands in {file.name} and in another shard of {record.folder}", code="anchor"
                )
            state[name] = RawTensor(tensor.spec, tensor.data.copy())
    if not state:
        raise MissingError(f"{objects.url}: {record.folder} holds no weights", code="anchor")
    return state


def _shards(state: Mapping[str, RawTensor], shard_bytes: int) -> Iterator[list[str]]:
    group: list[str] = []
    held = 0
    for name in sorted(state):
        nbytes = state[name].spec.nbytes
        if group and held + nbytes > shard_bytes:
            yield group
            group, held = [], 0
        group.append(name)
        held += nbytes
    yield group
