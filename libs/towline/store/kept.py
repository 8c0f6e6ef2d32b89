"""The LOG's entries in memory, all of them: the newest as they are used, older ones as they are stored, compressed by the block.

A LOG only grows, and every replica holds one: decoded, an entry takes some 3 kB, compressed some 400 bytes.
"""

from __future__ import annotations

import zlib

import msgspec

from towline.contract.entries import LogEntry, decode_entry

BLOCK = 64
"""Entries that are compressed together; between one and two blocks of the newest are kept open."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[bytes]).decode


class KeptEntries:
    """A list of entries that grows at its end. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._open: list[tuple[LogEntry, bytes]] = []
        self._looked_at: tuple[int, list[bytes]] | None = None
        """The block that was opened last: whoever walks a chain asks for its neighbours next."""

    def __len__(self) -> int:
        return len(self._blocks) * BLOCK + len(self._open)

    def append(self, entry: LogEntry, stored: bytes) -> None:
        """Keep entry number `len(self)`, of which `stored` are the bytes."""
        self._open.append((entry, stored))
        if len(self._open) == 2 * BLOCK:
            self._blocks.append(zlib.compress(_encode([data for _, data in self._open[:BLOCK]])))
            del self._open[:BLOCK]

    def __getitem__(self, number: int) -> LogEntry:
        place = number - len(self._blocks) * BLOCK
        return self._open[place][0] if place >= 0 else decode_entry(self.stored(number), number)

    def stored(self, number: int) -> bytes:
        """The entry's bytes, as the store has them."""
        place = number - len(self._blocks) * BLOCK
        if place >= 0:
            return self._open[place][1]
        block = number // BLOCK
        if self._looked_at is None or self._looked_at[0] != block:
            self._looked_at = (block, _decode(zlib.decompress(self._blocks[block])))
        return self._looked_at[1][number % BLOCK]

    def all(self) -> list[LogEntry]:
        return [self[number] for number in range(len(self))]
