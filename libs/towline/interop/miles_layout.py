"""One version in the miles/slime disk-delta layout: DIR/weight_v000007/ with shards of changed tensors and, last, its index.

A delta holds each changed tensor's bytes, XORed with the old ones or as (count, positions, values), in zstd; the checksum of its
final state stands beside it. A folder whose index has no delta metadata is a full checkpoint. Nothing here touches a state in
place: what is read is verified first, so there is no half-applied XOR.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zstandard

from towline.delta.checksum import hasher
from towline.delta.files import INDEX, load_folder, read_with_metadata, replacing, save_folder, write_safetensors
from towline.delta.numbers import Bytes
from towline.delta.state import ModelState, RawTensor, TensorSpec
from towline.errors import CorruptError, MissingError, UsageError

Encoding = Literal["xor", "overwrite"]
ENCODINGS: tuple[Encoding, ...] = ("xor", "overwrite")
CHECKSUMS = ("xxh3-128", "blake3", "adler32")
SHARD_BYTES = 1 << 30
"""Of final bytes in one shard, or one tensor."""
MAX_OVERWRITE_BYTES = 1 << 32
"""An overwrite's positions are 32 bits."""
_LEVEL = 1
_MAX_WINDOW_BYTES = 1 << 27
_FOLDER = re.compile(r"weight_v(\d{6,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """A version folder's index."""

    version: int
    base_version: int | None
    """None of a full checkpoint, as are the two after it."""
    encoding: Encoding | None
    checksum: str | None
    weight_map: Mapping[str, str]
    extra: Mapping[str, str]
    """Whatever else stands in its metadata."""


def folder_of(root: Path, version: int) -> Path:
    return root / f"weight_v{version:06d}"


def published(root: Path) -> list[int]:
    """The versions whose index is there."""
    found = [(_FOLDER.fullmatch(path.name), path) for path in root.iterdir()] if root.is_dir() else []
    return sorted(int(match[1]) for match, path in found if match and (path / INDEX).is_file())


def read_index(folder: Path) -> Index:
    """`MissingError` where the version isn't published (yet), `CorruptError` where its index can't be right."""
    path = folder / INDEX
    if not path.is_file():
        raise MissingError(f"{folder} holds no {INDEX}: the version isn't published yet", code="miles_version")
    try:
        tree = json.loads(path.read_bytes(), object_pairs_hook=_once)
        metadata, weight_map = dict(tree["metadata"]), dict(tree["weight_map"])
        version = int(metadata.pop("version"))
        encoding = metadata.pop("delta_encoding", None)
        base = metadata.pop("base_version", None)
        compression, checksum = metadata.pop("compression_format", None), metadata.pop("checksum_format", None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{path} can't be read: {error}", code="miles_index") from error
    files = set(weight_map.values())
    if any(not isinstance(file, str) or Path(file).name != file for file in files):
        raise CorruptError(f"{path} names a file outside of its folder", code="miles_index")
    match = _FOLDER.fullmatch(folder.name)
    if match is None or int(match[1]) != version:
        raise CorruptError(f"{path} says version {version}", code="miles_index")
    extra = {str(key): str(value) for key, value in metadata.items()}
    if encoding is None:
        return Index(version=version, base_version=None, encoding=None, checksum=None, weight_map=weight_map, extra=extra)
    if encoding not in ENCODINGS or compression != "zstd" or checksum not in CHECKSUMS or base is None:
        raise CorruptError(
            f"{path} has encoding {encoding!r}, compression {compression!r}, checksum {checksum!r}, base {base!r}: unknown",
            code="miles_index",
        )
    return Index(
        version=version, base_version=int(base), encoding=encoding, checksum=checksum, weight_map=weight_map, extra=extra
    )


def read_version(folder: Path, index: Index, base: Mapping[str, RawTensor], *, only: set[str] | None = None) -> ModelState:
    """The version's state on top of `base`, that of its base version, which stays as it is; unchanged tensors are shared.

    A full checkpoint must have the layout of `base`, whose version doesn't matter then. `MissingError` where a shard isn't here
    (yet); `CorruptError` names the tensor whose bytes, layout or checksum are wrong. only: of a delta, these tensors alone.
    """
    if index.encoding is None:
        full = load_folder(folder)
        if {n: t.spec for n, t in full.items()} != {n: t.spec for n, t in base.items()}:
            raise CorruptError(f"{folder} has other tensors than the model that it follows", code="layout_mismatch")
        return full
    assert index.checksum is not None
    state: ModelState = dict(base)
    seen: set[str] = set()
    for file in sorted(set(index.weight_map.values())):
        packed, checksums = read_with_metadata(folder / file)
        for name, tensor in packed.items():
            if only is not None and name not in only:
                continue
            if index.weight_map.get(name) != file:
                raise CorruptError(f"tensor {name!r} stands in {folder / file}, not where the index says", code="miles_delta")
            if name not in base:
                raise CorruptError(f"tensor {name!r} in {folder / file} isn't in the model", code="layout_mismatch")
            if tensor.spec.dtype != "U8" or len(tensor.spec.shape) != 1:
                raise CorruptError(f"tensor {name!r} in {folder / file} isn't 1-D U8", code="miles_delta")
            new = _decode(index.encoding, tensor.data, base[name])
            if name not in checksums or _digest(index.checksum, new) != checksums[name].lower():
                raise CorruptError(
                    f"tensor {name!r} of {folder} comes out with another checksum: another base, or damaged", code="tensor_digest"
                )
            state[name] = RawTensor(base[name].spec, new)
            seen.add(name)
    wanted = index.weight_map.keys() if only is None else only
    if seen != wanted:
        raise CorruptError(f"tensor {min(wanted - seen)!r} is missing from {folder}", code="miles_delta")
    return state


def unsettled(folder: Path, index: Index, state: Mapping[str, RawTensor]) -> set[str]:
    """The delta's tensors that haven't their final bytes in `state` yet: what a reader that died half-way has left to do."""
    assert index.checksum is not None
    done: set[str] = set()
    for file in sorted(set(index.weight_map.values())):
        for name, check in read_with_metadata(folder / file)[1].items():
            if (
                name in state
                and index.weight_map.get(name) == file
                and _digest(index.checksum, state[name].data) == check.lower()
            ):
                done.add(name)
    return index.weight_map.keys() - done


def write_delta(
    root: Path,
    version: int,
    base_version: int,
    base: Mapping[str, RawTensor],
    new: Mapping[str, RawTensor],
    *,
    encoding: Encoding = "xor",
    checksum: str = "xxh3-128",
    extra: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the version's folder, its index last. `UsageError` for another layout, and for a tensor too large for `overwrite`."""
    if {n: t.spec for n, t in new.items()} != {n: t.spec for n, t in base.items()}:
        raise UsageError("a delta needs two states of the same tensors", code="layout_mismatch")
    hasher(checksum)
    changed = [name for name in sorted(new) if not np.array_equal(new[name].data, base[name].data)]
    if encoding == "overwrite":
        for name in changed:
            _check_overwrite(new[name].spec)
    folder = _fresh(root, version)
    shards = list(_shards(changed, new, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        packed = {name: _packed(name, _encode(encoding, base[name].data, new[name].data)) for name in names}
        write_safetensors(packed, folder / file, {name: _digest(checksum, new[name].data) for name in names})
        weight_map.update(dict.fromkeys(names, file))
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{base_version:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    _write_index(folder, metadata | dict(extra or {}), weight_map)
    return folder


def write_full(
    root: Path, version: int, state: Mapping[str, RawTensor], others: Mapping[str, bytes], extra: Mapping[str, str] | None = None
) -> Path:
    """Write the version as a full checkpoint, with the other files of its Hugging Face folder; its index last."""
    folder = _fresh(root, version)
    for name, data in others.items():
        with replacing(folder / name) as file:
            file.write(data)
    save_folder(state, folder)
    index = folder / INDEX
    if index.is_file():
        weight_map = json.loads(index.read_bytes())["weight_map"]
        index.unlink()
    else:
        weight_map = dict.fromkeys(state, "model.safetensors")
    _write_index(folder, {"version": f"{version:06d}"} | dict(extra or {}), weight_map)
    return folder


def _fresh(root: Path, version: int) -> Path:
    """An empty folder for the version; a dead writer's leftovers go."""
    folder = folder_of(root, version)
    if (folder / INDEX).is_file():
        raise UsageError(f"{folder} is published already; a version is written once", code="miles_version")
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def _write_index(folder: Path, metadata: Mapping[str, str], weight_map: Mapping[str, str]) -> None:
    with replacing(folder / INDEX) as file:
        file.write(json.dumps({"metadata": dict(metadata), "weight_map": dict(weight_map)}, indent=2).encode())


def _shards(names: Sequence[str], state: Mapping[str, RawTensor], shard_bytes: int) -> Iterator[list[str]]:
    group: list[str] = []
    held = 0
    for name in names:
        if group and held + state[name].spec.nbytes > shard_bytes:
            yield group
            group, held = [], 0
        group.append(name)
        held += state[name].spec.nbytes
    if group:
        yield group


def _packed(name: str, raw: Bytes) -> RawTensor:
    # With a checksum of its own a frame that was damaged is caught also where the layout's checksum is adler32.
    packed = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(raw.data)
    return RawTensor(TensorSpec(name, "U8", (len(packed),)), np.frombuffer(packed, np.uint8))


def _encode(encoding: Encoding, old: Bytes, new: Bytes) -> Bytes:
    if encoding == "xor":
        return np.bitwise_xor(old, new)
    places = np.flatnonzero(old != new).astype("<u4")
    return np.concatenate([np.array([places.size], "<u4").view(np.uint8), places.view(np.uint8), new[places]])


def _decode(encoding: Encoding, packed: Bytes, old: RawTensor) -> Bytes:
    name, nbytes = old.spec.name, old.spec.nbytes
    if encoding == "xor":
        raw = _unpack(packed, name, nbytes)
        if raw.size != nbytes:
            raise CorruptError(f"tensor {name!r}: its XOR has {raw.size} bytes, the tensor {nbytes}", code="miles_delta")
        return np.bitwise_xor(old.data, raw)
    _check_overwrite(old.spec)
    raw = _unpack(packed, name, 4 + 5 * nbytes)
    count = int(raw[:4].view("<u4")[0]) if raw.size >= 4 else -1
    if count < 0 or raw.size != 4 + 5 * count:
        raise CorruptError(f"tensor {name!r}: an overwrite of {count} bytes doesn't have {raw.size}", code="miles_delta")
    places = raw[4 : 4 + 4 * count].copy().view("<u4")
    if count and int(places.max()) >= nbytes:
        raise CorruptError(f"tensor {name!r}: an overwrite reaches beyond its {nbytes} bytes", code="miles_delta")
    new = old.data.copy()
    new[places] = raw[4 + 4 * count :]
    return new


def _unpack(packed: Bytes, name: str, limit: int) -> Bytes:
    """At most `limit` bytes, whatever the frame says of itself."""
    out = bytearray()
    try:
        decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        with decoder.stream_reader(io.BytesIO(packed.data), read_size=1 << 20) as reader:
            while len(out) <= limit and (piece := reader.read(min(1 << 22, limit + 1 - len(out)))):
                out += piece
    except zstandard.ZstdError as error:
        raise CorruptError(f"tensor {name!r}: its bytes aren't a zstd frame: {error}", code="miles_delta") from error
    if len(out) > limit:
        raise CorruptError(f"tensor {name!r}: its frame holds more than the {limit} bytes that are possible", code="miles_delta")
    return np.frombuffer(out, np.uint8)


def _check_overwrite(spec: TensorSpec) -> None:
    if spec.nbytes > MAX_OVERWRITE_BYTES:
        raise UsageError(
            f"tensor {spec.name!r} has more than 4 GiB, which `overwrite` can't address: use xor", code="miles_overwrite"
        )


def _digest(algorithm: str, data: Bytes) -> str:
    found = hasher(algorithm)
    found.update(data)
    return found.digest().hex()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name stands there twice")
    return out
