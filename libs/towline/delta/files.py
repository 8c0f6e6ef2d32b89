"""Safetensors files and Hugging Face checkpoint folders as model states, bit for bit, without torch.

The header is read here rather than by the safetensors package: that has no numpy dtype for bfloat16 and fp8, copies every tensor,
and lets a name stand twice. The format: https://huggingface.co/docs/safetensors. Reading maps the file: a tensor costs
memory when it is touched. Every write goes to a temporary file first and is renamed when it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from towline.delta.numbers import Bytes
from towline.delta.state import DTYPE_BYTES, ModelState, RawTensor, TensorSpec
from towline.errors import CorruptError, FullError, MissingError, UsageError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 5_000_000_000
_MAX_HEADER_BYTES = 100_000_000


def read_safetensors(source: str | Path | bytes | memoryview) -> ModelState:
    """A file (memory-mapped, read-only) or a file's bytes as a state. `CorruptError` if it isn't a sound file."""
    return read_with_metadata(source)[0]


def read_with_metadata(source: str | Path | bytes | memoryview) -> tuple[ModelState, dict[str, str]]:
    """(state, the header's __metadata__)."""
    if isinstance(source, bytes | memoryview):
        return _parse(np.frombuffer(source, np.uint8), "the safetensors bytes")
    try:
        with open(source, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except FileNotFoundError:
        raise MissingError(f"there is no file {source}") from None
    return _parse(np.frombuffer(mapped, np.uint8), str(source))


def _parse(data: Bytes, where: str) -> tuple[ModelState, dict[str, str]]:
    if data.size < 8:
        raise CorruptError(f"{where} is too short for a safetensors file", code="safetensors")
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    if header_bytes > min(data.size - 8, _MAX_HEADER_BYTES):
        raise CorruptError(f"{where} is truncated, or isn't a safetensors file", code="safetensors")
    try:
        header = json.loads(data[8 : 8 + header_bytes].tobytes(), object_pairs_hook=_once)
        metadata = {str(k): str(v) for k, v in header.pop("__metadata__", {}).items()}
        rows = [(name, *_row(row)) for name, row in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{where} has a header that can't be read: {error}", code="safetensors") from error
    body, at = data[8 + header_bytes :], 0
    state: ModelState = {}
    for name, dtype, shape, start, stop in sorted(rows, key=lambda row: row[3:]):
        if dtype not in DTYPE_BYTES:
            raise CorruptError(f"tensor {name!r} in {where} has the unknown dtype {dtype!r}", code="safetensors")
        spec = TensorSpec(name, dtype, shape)
        if start != at or stop - start != spec.nbytes or stop > body.size:
            raise CorruptError(
                f"tensor {name!r} in {where} has offsets that don't fit its shape, or is cut off", code="safetensors"
            )
        state[name], at = RawTensor(spec, body[start:stop]), stop
    if at != body.size:
        raise CorruptError(f"{where} has {body.size - at} bytes that belong to no tensor", code="safetensors")
    return state, metadata


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return out


def _row(row: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    shape, (start, stop) = tuple(row["shape"]), row["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError("a shape or an offset isn't a number")
    return str(row["dtype"]), shape, start, stop


def write_safetensors(state: Mapping[str, RawTensor], path: str | Path, metadata: Mapping[str, str] | None = None) -> int:
    """Write the state's tensors, sorted by alignment and name as the safetensors package does; the file's size in bytes."""
    tensors = sorted(state.values(), key=lambda tensor: (-DTYPE_BYTES[tensor.spec.dtype], tensor.spec.name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for tensor in tensors:
        spec = tensor.spec
        offsets = [at, at + spec.nbytes]
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        at += spec.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(tensor.data.data)
    return 8 + len(text) + at


@contextlib.contextmanager
def telling_of_room(path: str | Path) -> Iterator[None]:
    """A full disk, a used-up quota or a limit on file sizes while the block writes `path` is a `FullError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        why = os.strerror(error.errno).lower()
        raise FullError(f"there is no room to write {path} ({why}): free some, or write elsewhere", code="disk_full") from error


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write that takes `path`'s place when the block ends well, and leaves nothing behind when it doesn't."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with telling_of_room(path):
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_folder(path: str | Path) -> ModelState:
    """A Hugging Face folder's weights: by its index, else model.safetensors, else every *.safetensors in it.

    `MissingError` for no weights or a missing shard, `CorruptError` for a tensor that stands twice, or elsewhere than
    the index says.
    """
    folder = Path(path)
    if not (folder / INDEX).exists():
        files = [folder / SINGLE] if (folder / SINGLE).exists() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise MissingError(f"{folder} holds no safetensors file")
        return _merge(files)
    try:
        weight_map = json.loads((folder / INDEX).read_bytes())["weight_map"]
        wanted = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{folder / INDEX} can't be read: {error}", code="safetensors") from error
    for file in wanted.values():
        if Path(file).name != file:
            raise CorruptError(f"{folder / INDEX} names a file outside of its folder: {file!r}", code="safetensors")
    state = _merge([folder / file for file in sorted(set(wanted.values()))])
    if state.keys() != wanted.keys():
        name = min(state.keys() ^ wanted.keys())
        raise CorruptError(
            f"tensor {name!r} is only in {'the index' if name in wanted else 'the shards'} of {folder}", code="safetensors"
        )
    return state


def _merge(files: Sequence[Path]) -> ModelState:
    state: ModelState = {}
    for file in files:
        for name, tensor in read_safetensors(file).items():
            if name in state:
                raise CorruptError(f"tensor {name!r} stands in {file} and in another shard", code="safetensors")
            state[name] = tensor
    return state


def load_model(path: str | Path) -> ModelState:
    """A safetensors file or a folder."""
    return load_folder(path) if Path(path).is_dir() else read_safetensors(path)


def save_folder(state: Mapping[str, RawTensor], path: str | Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> list[Path]:
    """Write model.safetensors, or shards of at most `max_shard_bytes` (or one tensor) and, last, their index; the files.

    Writes into `path`, which is made if needed; files of the same names are replaced.
    """
    if max_shard_bytes < 1:
        raise UsageError("max_shard_bytes must be at least 1", code="shard_size")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, RawTensor]] = [{}]
    held = 0
    for name in sorted(state):
        if shards[-1] and held + state[name].spec.nbytes > max_shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = state[name]
        held += state[name].spec.nbytes
    if len(shards) == 1:
        write_safetensors(shards[0], folder / SINGLE, {"format": "pt"})
        return [folder / SINGLE]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(shard, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.spec.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with replacing(folder / INDEX) as out:
        out.write(json.dumps(index, indent=2).encode())
    return [folder / file for file in sorted(set(weight_map.values()))] + [folder / INDEX]
