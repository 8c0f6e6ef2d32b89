"""A LOG in memory: every entry is there as it was stored, and a long one costs a fraction of what its entries take decoded."""

from __future__ import annotations

import gc
import random
import secrets
import tracemalloc

from towline.contract.entries import encode_entry
from towline.store.kept import BLOCK, KeptEntries

from .entries import version


def test_each_entry_is_found_again_wherever_it_stands() -> None:
    kept, stored = KeptEntries(), []
    for number in range(5 * BLOCK + 7):
        entry = version(number, 1, max(number - 1, 0), number, write_id=secrets.token_hex(16), density=random.random())
        stored.append((entry, encode_entry(entry)))
        kept.append(*stored[-1])
        assert len(kept) == number + 1
        for place in {0, number, random.randrange(number + 1), max(number - BLOCK, 0)}:
            assert (kept[place], kept.stored(place)) == stored[place]
    assert kept.all() == [entry for entry, _ in stored]


def test_old_entries_take_less_memory_than_their_stored_bytes() -> None:
    kept = KeptEntries()

    def grow(start: int, count: int) -> int:
        size = 0
        for number in range(start, start + count):
            fields = {key: secrets.token_hex(32) for key in ("prev", "base_digest", "manifest_digest", "model_digest")}
            entry = version(number, 1, number, number, write_id=secrets.token_hex(16), layout_digest="ab" * 32, **fields)
            stored = encode_entry(entry)
            kept.append(entry, stored)
            size += len(stored)
        return size

    grow(0, 2 * BLOCK)
    gc.collect()
    tracemalloc.start()
    try:
        size = grow(2 * BLOCK, 20 * BLOCK)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < size
    finally:
        tracemalloc.stop()
