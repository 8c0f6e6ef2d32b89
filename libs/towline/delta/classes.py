"""The `class` codec of dense mode: positions counted within classes of the old value's exponent. For 2-byte elements.

A step of the optimiser flips a weight's last bit the more often the smaller the weight is: the chance halves with each octave.
Within one class the gaps are close to geometric, which costs a third less than gaps over all elements. FORMAT.md has
the streams; the scans over every element are `scans` here, and in `kernels` compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from towline.delta import frames
from towline.delta.frames import EMPTY
from towline.delta.numbers import Bytes, Index, Unsigned, from_runs, pack, to_gaps, to_planes, to_positions, to_runs, unpack
from towline.delta.streams import add, differences_of, read_step_codes, step_codes, steps_of
from towline.errors import CorruptError

CLASS_SHIFT = 7
"""A class is made of values of bits 7..14: a bfloat16's exponent, a float16's exponent and upper mantissa bits."""
POOL_CHANGES = 300
"""Neighbouring classes are pooled until they have so many changes: a class costs about 100 bytes of its own."""
RUNS, SPLIT, BITMAP = 0, 1, 2
PER_CLASS = 4


class Scans(Protocol):
    """The passes over every element of a block (uint16[n]); `classes` is uint8[256]."""

    def ranks(self, old: Unsigned, classes: Bytes, positions: Index) -> tuple[Index, Index]:
        """(how many elements of the same class stand before each position, int64[256] elements of each class)."""

    def locate(self, old: Unsigned, classes: Bytes, ranks: Index, starts: Index) -> tuple[Index, Index]:
        """(the positions of ranks[starts[c]:starts[c+1]], ascending, of each class c; elements of each class as above).

        What it gives for a rank that is no element's is undefined.
        """


class NumpyScans:
    def ranks(self, old: Unsigned, classes: Bytes, positions: Index) -> tuple[Index, Index]:
        of = classes[class_value(old)]
        ranks = np.empty(positions.size, np.int64)
        for c in range(int(classes.max()) + 1):
            mine = of[positions] == c
            ranks[mine] = np.searchsorted(np.flatnonzero(of == c), positions[mine])
        return ranks, np.bincount(of, minlength=256)

    def locate(self, old: Unsigned, classes: Bytes, ranks: Index, starts: Index) -> tuple[Index, Index]:
        of = classes[class_value(old)]
        found = []
        for c in range(starts.size - 1):
            wanted = ranks[starts[c] : starts[c + 1]]
            members = np.flatnonzero(of == c)
            found.append(members[np.minimum(wanted, members.size - 1)] if members.size else np.zeros(wanted.size, np.int64))
        return np.concatenate(found), np.bincount(of, minlength=256)


def class_value(bits: Unsigned) -> Bytes:
    return ((bits >> CLASS_SHIFT) & 255).astype(np.uint8)


def limits(count: int, classes: int) -> list[int]:
    """The most bytes each stream can hold (the map's limit is exact)."""
    runs = count + count // 255 + 1
    return [256 + classes, *[runs, -(-count // 4), runs, -(-count // 4)] * classes, count, count, count]


def encode(old: Unsigned, new: Unsigned, positions: Index, sign_magnitude: bool, scans: Scans) -> list[Bytes]:
    """The streams of a block in which `positions` changed."""
    classes = _pool(np.bincount(class_value(old[positions]), minlength=256))
    number = int(classes.max()) + 1
    ranks, sizes = scans.ranks(old, classes, positions)
    steps = steps_of(old[positions], new[positions], sign_magnitude)
    of = classes[class_value(old[positions])]
    kinds = np.zeros(number, np.uint8)
    streams: list[Bytes] = []
    order: list[Index] = []
    for c in range(number):
        mine = np.flatnonzero(of == c)
        kinds[c], placed = _place(ranks[mine], int(sizes[c]))
        streams += [*placed, step_codes(steps[mine])[0]]
        order.append(mine)
    rest = step_codes(steps[np.concatenate(order)])[1:]
    return [np.concatenate([classes, kinds]), *streams, *rest]


def decode(target: Unsigned, streams: Sequence[Bytes], sign_magnitude: bool, scans: Scans) -> int:
    """Apply to `target` in place; the number of entries."""
    if streams[0].size < 257:
        raise CorruptError("a class map is too short", code="delta_stream")
    classes, kinds = streams[0][:256], streams[0][256:]
    number = int(classes.max()) + 1
    if kinds.size != number or len(streams) != 1 + PER_CLASS * number + 3:
        raise CorruptError("a class map is for another number of classes", code="delta_stream")
    ranks, codes = [], []
    for c in range(number):
        at = 1 + PER_CLASS * c
        ranks.append(_find(int(kinds[c]), streams[at : at + 3], target.size))
        codes.append(unpack(streams[at + 3], 2, ranks[c].size))
    starts = np.cumsum([0, *(each.size for each in ranks)])
    steps = read_step_codes([pack(np.concatenate(codes), 2), *streams[-3:]], int(starts[-1]), 2)
    positions, sizes = scans.locate(target, classes, np.concatenate(ranks), starts)
    for c, mine in enumerate(ranks):
        flags = int(kinds[c]) == BITMAP and streams[1 + PER_CLASS * c].size != -(-int(sizes[c]) // 8)
        if flags or (mine.size and mine[-1] >= sizes[c]):
            raise CorruptError("places don't fit their class", code="delta_stream")
    target[positions] = add(target[positions], differences_of(steps), sign_magnitude)
    return int(positions.size)


def _pool(changed: Index) -> Bytes:
    """Class of each class value: neighbours together, from the small values up."""
    classes = np.zeros(256, np.uint8)
    current, held = 0, 0
    for value in range(256):
        classes[value] = current
        held += int(changed[value])
        if held >= POOL_CHANGES and changed[value + 1 :].any():
            current, held = current + 1, 0
    return classes


def _place(ranks: Index, size: int) -> tuple[int, list[Bytes]]:
    """(kind, three streams) of the ranks among `size` elements: the smallest of the kinds that can be at this density."""
    gaps = to_gaps(ranks)
    options: list[tuple[int, list[Bytes]]] = [(RUNS, [to_runs(gaps), EMPTY, EMPTY])]
    if ranks.size * 200 < size:
        high = gaps >> 8
        codes = np.minimum(high, 3).astype(np.uint8)
        low = to_planes((gaps & 255).astype(np.uint8))[0]
        options.append((SPLIT, [low, pack(codes, 2), to_runs(high[codes == 3] - 3)]))
    elif ranks.size * 6 > size:
        flags = np.zeros(size, np.uint8)
        flags[ranks] = 1
        options.append((BITMAP, [np.packbits(flags, bitorder="little"), EMPTY, EMPTY]))
    return min(options, key=lambda option: sum(len(frames.compress(stream)) for stream in option[1]))


def _find(kind: int, streams: Sequence[Bytes], limit: int) -> Index:
    """The ranks that `_place` wrote; those of a class with more than `limit` elements can't be."""
    if kind == BITMAP and streams[0].size <= -(-limit // 8) and not streams[1].size and not streams[2].size:
        return np.flatnonzero(np.unpackbits(streams[0], bitorder="little"))
    if kind == SPLIT:
        codes = unpack(streams[1], 2, streams[0].size)
        high = codes.astype(np.int64)
        over = from_runs(streams[2])
        if over.size != (codes == 3).sum():
            raise CorruptError("streams of different lengths", code="delta_stream")
        high[codes == 3] += over
        return to_positions(streams[0] + (high << 8))
    if kind == RUNS and not streams[1].size and not streams[2].size:
        return to_positions(from_runs(streams[0]))
    raise CorruptError(f"places of kind {kind} have impossible streams", code="delta_stream")
