"""MessagePack in and out, and the digest that names a payload.

Every message is a map with a `schema` number. A reader of schema 1 ignores fields it doesn't know and refuses another
schema number; so a field may be added with a default, and anything else needs a new number.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import xxhash

from towline.errors import MalformedError

SCHEMA = 1
MAX_MESSAGE_BYTES = 1 << 30
"""A message, blobs included, is never larger."""

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


class _Envelope(msgspec.Struct):
    schema: int


_envelope = msgspec.msgpack.Decoder(_Envelope)


def encode(message: msgspec.Struct) -> bytes:
    """The message as MessagePack; equal messages give equal bytes."""
    return _encoder.encode(message)


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    """The message in `data`, or `MalformedError` with the whole of it: over-size, truncated, another schema, a wrong type."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedError(f"{what}: {len(data)} bytes, more than {MAX_MESSAGE_BYTES}", code="message_size", data=data)
    try:
        schema = _envelope.decode(data).schema
        if schema != SCHEMA:
            raise MalformedError(f"{what}: schema {schema}, this reader knows {SCHEMA}", code="schema", data=data)
        return decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(f"{what}: {error}", data=data) from error


def digest(data: bytes) -> bytes:
    """xxh3-128 of a payload, 16 bytes, big endian: names a trajectory's bytes and a blob."""
    return xxhash.xxh3_128_digest(data)


def plain(message: msgspec.Struct) -> Any:
    """The message as plain Python values, for JSON and people."""
    return msgspec.to_builtins(message)
