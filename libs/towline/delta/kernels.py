"""The compiled backend: sparse blocks of 2-byte elements and the scans of dense mode; everything else as in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from towline.delta import classes, frames, kernels16, streams
from towline.delta.backend import Absorb, NumpyBackend
from towline.delta.classes import Scans
from towline.delta.frames import EMPTY
from towline.delta.numbers import Bytes, Index, Unsigned
from towline.errors import CorruptError

STEP_BYTES = 2 << 20
"""State bytes between two calls of `absorb`: small enough to be hashed from a cache, and large enough that threads seldom
wait for each other between calls."""
_START = np.uint64(0xFFFFFFFFFFFFFFFF)


class _Scratch:
    """A thread's output buffers, kept between blocks: fresh pages would cost as much as the scan. They are only touched
    as far as changes fill them."""

    free: list[_Scratch] = []  # noqa: RUF012  (shared on purpose; list.pop and append are atomic)

    def __init__(self, count: int) -> None:
        self.count = count
        runs = count + count // 255 + 1
        self.buffers = [np.empty(size, np.uint8) for size in (runs, count // 4 + 1, count, count, count)]
        self.found = np.empty(kernels16.POSITIONS_ROOM, np.uint32)

    @classmethod
    def take(cls, count: int) -> _Scratch:
        try:
            scratch = cls.free.pop()
        except IndexError:
            return cls(count)
        return scratch if scratch.count >= count else cls(count)

    def give_back(self) -> None:
        if len(self.free) < 16:
            self.free.append(self)


class NumbaScans:
    def ranks(self, old: Unsigned, classes: Bytes, positions: Index) -> tuple[Index, Index]:
        ranks, counts = np.empty(positions.size, np.int64), np.zeros(256, np.int64)
        kernels16.class_ranks(old.view(np.uint8), classes, positions, ranks, counts)
        return ranks, counts

    def locate(self, old: Unsigned, classes: Bytes, ranks: Index, starts: Index) -> tuple[Index, Index]:
        positions, counts = np.zeros(ranks.size, np.int64), np.zeros(256, np.int64)
        kernels16.class_locate(old.view(np.uint8), classes, ranks, starts, positions, counts)
        return positions, counts


class NumbaBackend(NumpyBackend):
    name = "numba"
    scans: Scans = NumbaScans()

    def encode(
        self, codec: str, old: Sequence[Bytes], new: Sequence[Bytes], width: int, sign_magnitude: bool, absorb: Absorb
    ) -> tuple[int, list[Bytes]]:
        if width != 2:
            return super().encode(codec, old, new, width, sign_magnitude, absorb)
        if codec == streams.SPARSE:
            return _encode_sparse(old, new, 0xFFFF if sign_magnitude else 0, absorb)
        before, after = streams.as_elements(old, width), streams.as_elements(new, width)
        found = np.empty(before.size, np.int64)
        positions = found[: kernels16.positions(before.view(np.uint8), after.view(np.uint8), found)]
        if codec == streams.CLASSES:
            data = classes.encode(before, after, positions, sign_magnitude, self.scans)
        else:
            data = streams.encode_low2(before, after, positions, sign_magnitude)
        for index, view in enumerate(new):
            absorb(index, 0, view.size)
        return int(positions.size), data if positions.size else [EMPTY] * len(data)

    def pack_planes(self, values: Unsigned) -> list[bytes]:
        if values.itemsize != 2:
            return super().pack_planes(values)
        scratch = _Scratch.take(values.size)
        low, high = (buffer[: values.size] for buffer in scratch.buffers[2:4])
        kernels16.split(values, low, high)
        packed = [frames.compress(low), frames.compress(high)]
        scratch.give_back()
        return packed

    def decode(
        self, codec: str, target: Sequence[Bytes], data: Sequence[Bytes], width: int, sign_magnitude: bool, absorb: Absorb
    ) -> int:
        if width != 2 or codec != streams.SPARSE:
            return super().decode(codec, target, data, width, sign_magnitude, absorb)
        return _decode_sparse(target, data, 0xFFFF if sign_magnitude else 0, absorb)


def _encode_sparse(old: Sequence[Bytes], new: Sequence[Bytes], flips: int, absorb: Absorb) -> tuple[int, list[Bytes]]:
    scratch = _Scratch.take(sum(view.size for view in new) // 2)
    state = np.array([_START, 0, 0, 0, 0], np.uint64)
    for index, (before, after) in enumerate(zip(old, new, strict=True)):
        for start in range(0, after.size, STEP_BYTES):
            stop = min(start + STEP_BYTES, after.size)
            kernels16.encode(before, after, start >> 1, stop >> 1, flips, state, scratch.found, *scratch.buffers)
            absorb(index, start, stop)
        state[:1] -= np.uint64(after.size >> 1)
    _, gaps, entries, small, whole = map(int, state)
    sizes = (gaps, -(-entries // 4), small, whole, whole)
    data = [buffer[:size].copy() for buffer, size in zip(scratch.buffers, sizes, strict=True)]
    scratch.give_back()
    return entries, data


def _decode_sparse(target: Sequence[Bytes], data: Sequence[Bytes], flips: int, absorb: Absorb) -> int:
    gaps, codes, small, low, high = data
    if low.size != high.size or (gaps.size and gaps[-1] == 255):
        raise CorruptError("streams of different lengths", code="delta_stream")
    state = np.array([_START, 0, 0, 0, 0], np.uint64)
    found = np.empty(kernels16.AHEAD, np.uint32)
    for index, view in enumerate(target):
        for start in range(0, view.size, STEP_BYTES):
            stop = min(start + STEP_BYTES, view.size)
            if not kernels16.decode(view, start >> 1, stop >> 1, flips, state, found, gaps, codes, small, low, high):
                raise CorruptError("a stream ends too early", code="delta_stream")
            absorb(index, start, stop)
        state[:1] -= np.uint64(view.size >> 1)
    _, used, entries, used_small, used_whole = map(int, state)
    tail = entries % 4
    full = used == gaps.size and used_small == small.size and used_whole == low.size and codes.size == -(-entries // 4)
    if not full or (tail and codes[-1] >> (2 * tail)):
        raise CorruptError("a stream goes on after the last element", code="delta_stream")
    return entries
