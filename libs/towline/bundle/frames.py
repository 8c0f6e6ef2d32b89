"""A stream as one file: each message a frame, in order; a reader finds any of them by sequence or by subject.

A frame is its length (u32, little endian) and as many bytes of MessagePack: [sequence, subject, at, headers, data]. BUNDLE.md
has the format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from towline.bus.client import Message
from towline.errors import CorruptError

_LENGTH = struct.Struct("<I")


class _Frame(msgspec.Struct, array_like=True):
    sequence: int
    subject: str
    at: float
    headers: dict[str, str]
    data: bytes


_decoder = msgspec.msgpack.Decoder(_Frame)
_encoder = msgspec.msgpack.Encoder()


def write_message(file: BinaryIO, message: Message) -> None:
    """Append the message; the caller keeps the order of the sequences."""
    body = _encoder.encode(_Frame(message.sequence, message.subject, message.at, message.headers, message.data))
    file.write(_LENGTH.pack(len(body)) + body)


def read_messages(path: Path) -> Iterator[tuple[int, Message]]:
    """(offset, message), in order. `CorruptError` where a frame is cut off, unreadable or out of order."""
    last = 0
    with path.open("rb") as file:
        while True:
            offset = file.tell()
            message = _next(file, path)
            if message is None:
                return
            if message.sequence <= last:
                raise CorruptError(f"{path}: message {message.sequence} after {last}", code="bundle_stream")
            last = message.sequence
            yield offset, message


class StreamFile:
    """A stream's file, indexed at the first need by one pass over it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets: dict[int, int] = {}
        self._last: dict[str, int] = {}
        self._indexed = False

    def messages(self) -> Iterator[Message]:
        return (message for _, message in read_messages(self.path))

    def get(self, sequence: int) -> Message | None:
        self._index()
        offset = self._offsets.get(sequence)
        return None if offset is None else self._at(offset)

    def last(self, subject: str) -> Message | None:
        self._index()
        sequence = self._last.get(subject)
        return None if sequence is None else self.get(sequence)

    def _index(self) -> None:
        if self._indexed:
            return
        for offset, message in read_messages(self.path):
            self._offsets[message.sequence] = offset
            self._last[message.subject] = message.sequence
        self._indexed = True

    def _at(self, offset: int) -> Message | None:
        with self.path.open("rb") as file:
            file.seek(offset)
            return _next(file, self.path)


def _next(file: BinaryIO, path: Path) -> Message | None:
    """None at the end of the file."""
    head = file.read(_LENGTH.size)
    if not head:
        return None
    length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
    body = file.read(length)
    try:
        if not length or len(body) != length:
            raise msgspec.DecodeError("it is cut off")
        frame = _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{path}: a message can't be read: {error}", code="bundle_stream") from error
    return Message(frame.subject, frame.sequence, frame.data, frame.headers, frame.at)
