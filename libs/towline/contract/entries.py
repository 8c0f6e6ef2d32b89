"""The LOG's entries: JSON, create-only, one fact each. docs/design/001-protocol.md, sections 1 to 3, has the rules."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from towline.contract.codec import SCHEMA
from towline.errors import CorruptError, InvariantError

MAX_ENTRY_BYTES = 4096


class Entry(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every entry has. `prev` is the sha256 of entry number-1's bytes; entry 0 has none."""

    schema: int = SCHEMA
    number: int
    prev: str | None
    write_id: str
    at: float


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed tokens and what the version's own policy says of them: `logprobs[i]` is that of tokens[i+1] at temperature 1."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float


class BaseEntry(Entry, frozen=True, kw_only=True, tag="base"):
    """Entry 0: the model before the first batch. `source` is what the user named; `anchor` holds its bytes, a Hugging Face
    folder, under the store's prefix."""

    source: str
    revision: str | None
    anchor: str
    layout_digest: str
    model_digest: str
    probe: Probe | None = None


class OpenEntry(Entry, frozen=True, kw_only=True, tag="open"):
    """A trainer starts epoch `number` on the version `base`, whose entry has the sha256 `base_digest`."""

    base: int
    base_digest: str
    depth: int
    """The base's."""
    batch_cursor: int
    """CONTROL sequence of the last batch in the base."""
    checkpoint: str | None
    """The checkpoint it goes on from; None at entry 0."""


class VersionEntry(Entry, frozen=True, kw_only=True, tag="version"):
    """A committed policy version: `folder`/manifest.json, whose sha256 is `manifest_digest`, on top of `base`."""

    epoch: int
    base: int
    base_digest: str
    depth: int
    skipped: tuple[int, ...]
    """Batches (by for_depth) that this version consumed without training on them."""
    representation: Literal["full", "delta"]
    codec: str
    folder: str
    manifest_digest: str
    layout_digest: str
    model_digest: str
    density: float
    """Changed elements / elements."""
    wire_bytes: int
    model_bytes: int
    step: int
    """The trainer's optimiser step."""
    batch_cursor: int
    checkpoint: str | None
    probe: Probe | None
    encode_seconds: float
    upload_seconds: float
    verify_seconds: float
    missing_rows: int = 0
    skip_reasons: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    """Why optimiser steps on this version's batches were left out, and how many: non_finite_loss and non_finite_gradient count
    steps, no_rows and no_signal batches. A batch of which some steps were taken isn't in `skipped`. Absent where none was."""


class QuarantineEntry(Entry, frozen=True, kw_only=True, tag="quarantine"):
    """The version and its descendants may neither serve nor be built on."""

    version: int
    reason: str


LogEntry = BaseEntry | OpenEntry | VersionEntry | QuarantineEntry
_decoder: msgspec.json.Decoder[LogEntry] = msgspec.json.Decoder(LogEntry)
_encoder = msgspec.json.Encoder()


def encode_entry(entry: LogEntry) -> bytes:
    """The entry's bytes, as they are stored and hashed."""
    data = _encoder.encode(entry)
    if len(data) > MAX_ENTRY_BYTES:
        raise InvariantError(f"entry {entry.number} has {len(data)} bytes, more than {MAX_ENTRY_BYTES}", code="entry_size")
    return data


def decode_entry(data: bytes, number: int) -> LogEntry:
    """Entry `number`; `CorruptError` where the bytes aren't it."""
    try:
        entry = _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"log entry {number} can't be read: {error}", code="log_entry") from error
    if entry.schema != SCHEMA or entry.number != number:
        raise CorruptError(f"log entry {number} says schema {entry.schema}, number {entry.number}", code="log_entry")
    return entry


def entry_digest(data: bytes) -> str:
    """sha256 of an entry's bytes, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()
