"""The inverse of a change to a copy in place: what each changed element was before, written before it is overwritten.

Nothing is changed that isn't in it, so after a crash at any point putting back what the journal holds gives the state before;
doing it twice does too. When to is for the host's record to say.

The file: a magic, then records of a MessagePack head (length first), the payload, and the xxh3-64 of both.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from towline.delta.numbers import Bytes, width_of
from towline.delta.state import ModelState, TensorSpec
from towline.errors import CorruptError, MissingError

MAGIC = b"TLUNDO01"


class _Head(msgspec.Struct, frozen=True, array_like=True):
    name: str
    first_byte: int
    width: int
    """Bytes an element."""
    count: int
    """Elements in the payload."""
    whole: bool
    """All of a range: the payload is their old values. Else int32 positions from `first_byte` on, then old values."""

    @property
    def payload_bytes(self) -> int:
        return self.count * (self.width if self.whole else self.width + 4)


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Head)


class UndoJournal:
    """A `towline.delta.applier.Journal` in a file of its own; `names` are the tensors that changed."""

    def __init__(self, path: Path) -> None:
        self.names: set[str] = set()
        self._file = path.open("wb")
        self._file.write(MAGIC)
        self._file.flush()
        self._lock = threading.Lock()

    def record(self, spec: TensorSpec, first_byte: int, old: Bytes, new: Bytes) -> None:
        width = width_of(spec.dtype)
        before, after = old.view(f"<u{width}"), new.view(f"<u{width}")
        positions = np.flatnonzero(before != after)
        if not positions.size:
            return
        whole = positions.size * (width + 4) >= old.size
        head = _Head(spec.name, first_byte, width, old.size // width if whole else int(positions.size), whole)
        payload = old.tobytes() if whole else positions.astype("<u4").tobytes() + before[positions].tobytes()
        with self._lock:
            self.names.add(spec.name)
            self._file.write(_frame(head, payload))
            # In the kernel's hands before the caller overwrites anything: it survives this process.
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _frame(head: _Head, payload: bytes) -> bytes:
    packed = _encoder.encode(head)
    body = len(packed).to_bytes(4, "little") + packed + payload
    return body + xxhash.xxh3_64_digest(body)


def roll_back(path: Path, state: ModelState) -> set[str]:
    """Put back in `state` everything that the journal holds; the names of those tensors. May be repeated.

    A record that was cut off by a crash is passed over: what it is about hadn't been changed. `MissingError` without a
    journal, `CorruptError` for one that doesn't fit the state.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    except FileNotFoundError:
        raise MissingError(f"there is no journal {path}") from None
    if bytes(data[: len(MAGIC)]) != MAGIC:
        raise CorruptError(f"{path} isn't an undo journal", code="undo_journal")
    names = set()
    for head, payload in reversed(list(_records(data))):
        tensor = state.get(head.name)
        if tensor is None or tensor.spec.nbytes < head.first_byte or width_of(tensor.spec.dtype) != head.width:
            raise CorruptError(f"{path} is about another model: it names tensor {head.name!r}", code="undo_journal")
        values: Bytes = np.frombuffer(payload, np.uint8)
        target = tensor.data[head.first_byte :]
        if head.whole:
            target[: values.size] = values
        else:
            positions, old = values[: 4 * head.count].view("<u4"), values[4 * head.count :].view(f"<u{head.width}")
            target[: target.size // head.width * head.width].view(f"<u{head.width}")[positions] = old
        names.add(head.name)
    return names


def _records(data: memoryview) -> Iterator[tuple[_Head, memoryview]]:
    at = len(MAGIC)
    while at + 4 <= len(data):
        packed = int.from_bytes(data[at : at + 4], "little")
        try:
            head = _decoder.decode(data[at + 4 : at + 4 + packed])
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            return
        end = at + 4 + packed + head.payload_bytes
        if end + 8 > len(data) or xxhash.xxh3_64_digest(data[at:end]) != bytes(data[end : end + 8]):
            return
        yield head, data[at + 4 + packed : end]
        at = end + 8
