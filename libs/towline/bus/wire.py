"""What comes over the bus: messages with their place in a stream, answers and their errors, and stubs of blobs.

A payload that is larger than the server takes stands in the object store; its message is empty and names it in a header.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import msgspec
from nats.aio.msg import Msg

from towline.contract.codec import digest
from towline.errors import CorruptError, FullError, UnavailableError, UsageError

NO_RESPONDERS = "503"
DENIED_CODE = "bus_denied"
BLOB_HEADER = "Towline-Blob"
"""xxh3-128 of the payload, 32 hex digits; the payload is the blob of that name."""

EXPECTED_LAST = "Nats-Expected-Last-Sequence"
EXPECTED_LAST_OF_SUBJECT = "Nats-Expected-Last-Subject-Sequence"
MESSAGE_ID = "Nats-Msg-Id"

WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
STREAM_FULL = frozenset({10077, 10023})
NO_STORAGE = 10047
NOT_FOUND = 404
_PLACE_HEADERS = ("Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Num-Pending", "Nats-Last-Sequence")


class Blobs(Protocol):
    """What the bus needs of `towline.store.blobs.Blobs`; both may block."""

    def put(self, data: bytes) -> bytes: ...

    def get(self, digest: bytes) -> bytes: ...


class Unsettled(UnavailableError):
    """Nobody knows whether what was sent took effect."""

    def __init__(self, message: str, *, no_responders: bool = False) -> None:
        super().__init__(message, code="bus_unsettled")
        self.no_responders = no_responders


class ApiError(Exception):
    """The server's refusal: HTTP-like `code`, `err_code` (what happened) and its text."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} ({err_code})")
        self.code = code
        self.err_code = err_code
        self.description = description

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later."""
        return self.err_code != NO_STORAGE and (self.code >= 500 or self.code == 429)

    def translated(self, what: str) -> UnavailableError | UsageError:
        """As an error of Towline's: full, may pass by itself (5xx and 429), or a wrong call."""
        if self.err_code in STREAM_FULL:
            return FullError(f"{what}: {self}", code="bus_full")
        if self.may_pass:
            return UnavailableError(f"{what}: {self}", code="bus_api")
        return UsageError(f"{what}: {self}", code="bus_api")


@dataclass(frozen=True, slots=True)
class Message:
    """A message as it stands in a stream; a payload that was moved to a blob is here again. `at` is Unix seconds."""

    subject: str
    sequence: int
    data: bytes
    headers: dict[str, str]
    at: float


class Place(NamedTuple):
    """What a consumer's reply subject says of the message it came with."""

    sequence: int
    consumer_sequence: int
    num_delivered: int
    at: float
    pending: int
    """Messages of the consumer's filter that were still to come."""


_decode = msgspec.json.Decoder().decode


def answer(reply: Msg) -> dict[str, Any]:
    """A JetStream answer's content; `ApiError` where it says one."""
    content: dict[str, Any] = _decode(reply.data)
    error = content.get("error")
    if error:
        raise ApiError(error.get("code", 500), error.get("err_code", 0), error.get("description", "no reason given"))
    return content


def place(reply_subject: str) -> Place:
    """`$JS.ACK.[domain.account.]stream.consumer.delivered.stream-seq.consumer-seq.time.pending[.token]`"""
    tokens = reply_subject.split(".")
    first = 4 if len(tokens) == 9 else 6
    return Place(
        num_delivered=int(tokens[first]),
        sequence=int(tokens[first + 1]),
        consumer_sequence=int(tokens[first + 2]),
        at=int(tokens[first + 3]) / 1e9,
        pending=int(tokens[first + 4]),
    )


def timestamp(text: str) -> float:
    """An RFC 3339 time, of up to nanoseconds, as Unix seconds."""
    return datetime.fromisoformat(text).timestamp()


def header_bytes(headers: Mapping[str, str]) -> int:
    """What the headers add to a message's size."""
    return 12 + sum(len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items()) if headers else 0


def own_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers without those that say where the message stands."""
    return {name: value for name, value in (headers or {}).items() if name not in _PLACE_HEADERS}


@dataclass(frozen=True, slots=True)
class Stub:
    """A message as it is sent and stored: `data` is empty where the payload is a blob."""

    data: bytes
    headers: dict[str, str]

    def same_as(self, data: bytes, headers: Mapping[str, str]) -> bool:
        """Whether a stored message is this one."""
        return data == self.data and headers.get(BLOB_HEADER) == self.headers.get(BLOB_HEADER)


async def stow(data: bytes, headers: dict[str, str], room: int, blobs: Blobs | None, subject: str) -> Stub:
    """The message that carries `data` in at most `room` bytes, headers included; where it has to be a blob, that is put first."""
    if len(data) + header_bytes(headers) <= room:
        return Stub(data, headers)
    if blobs is None:
        raise UsageError(
            f"{subject}: {len(data)} bytes are more than the bus takes ({room}) and this client has no blob store",
            code="payload_size",
        )
    name = await asyncio.to_thread(blobs.put, data)
    return Stub(b"", {**headers, BLOB_HEADER: name.hex()})


async def fetch(data: bytes, headers: Mapping[str, str], blobs: Blobs | None, subject: str) -> bytes:
    """The payload of a stored message. `CorruptError` where the blob isn't what its name says."""
    name = headers.get(BLOB_HEADER)
    if name is None:
        return data
    if blobs is None:
        raise UsageError(f"{subject}: its payload is blob {name} and this client has no blob store", code="blob_store")
    payload = await asyncio.to_thread(blobs.get, bytes.fromhex(name))
    if digest(payload).hex() != name:
        raise CorruptError(f"{subject}: blob {name} has other bytes than its name says", code="blob")
    return payload
