"""Entries of the LOG by the block, so that a new reader of a long LOG asks for a few objects and not for each entry.

A pack is a second representation: nothing is decided by it. Each entry holds the digest of the one before, so a block whose last
entry is the stored one, byte for byte, and whose entries follow each other, is the LOG's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from towline.contract.entries import decode_entry, entry_digest
from towline.errors import TowlineError

ENTRIES = 256
"""Of a pack: entry n stands in pack n // 256, once all of that pack's are written."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[bytes])


def encode_pack(entries: Sequence[bytes]) -> bytes:
    """A MessagePack array of the entries' bytes, in order."""
    return _encoder.encode(list(entries))


def open_pack(data: bytes, number: int, last: bytes | None) -> list[bytes] | None:
    """The entries of pack `number`, of which `last` is the last one as it's stored; None for one that can't be trusted."""
    try:
        found = _decoder.decode(data)
        if len(found) != ENTRIES or found[-1] != last:
            return None
        entries = [decode_entry(entry, number * ENTRIES + place) for place, entry in enumerate(found)]
    except (msgspec.DecodeError, TowlineError):
        return None
    follows = all(entry.prev == entry_digest(before) for before, entry in zip(found, entries[1:], strict=False))
    return found if follows else None
