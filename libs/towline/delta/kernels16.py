"""The compiled loops over 2-byte elements; `streams` and `classes` have the same in numpy, and FORMAT.md the streams.

Encoding and decoding of a sparse block go on where they stopped, so that a caller can walk a block in steps that fit the
cache and hash each one there, and can cross from one tensor to the next. state = [index of the last entry (2**64 - 1 is
"-1"), gap bytes, entries, small bytes, whole values], uint64[5].
"""

from __future__ import annotations

from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any, TypeVar

import numpy as np
from numba import njit, types

from towline.delta.intrinsics import READ, U64, WRITE, differing, load, ones, prefetch, store, trailing_zeros

F = TypeVar("F", bound=Callable[..., Any])
STATE = types.Array(types.uint64, 1, "C")
POSITIONS = types.Array(types.uint32, 1, "C")
INDEX = types.Array(types.int64, 1, "C")
INDEX_READ = types.Array(types.int64, 1, "C", readonly=True)
I64 = types.int64
_u = np.uint64
BLOCKS = 512
"""32-element blocks of which the encoder gathers the positions at a time."""
POSITIONS_ROOM = BLOCKS * 32 + 32
_NO_CACHE = (RuntimeError, OSError, EOFError, UnpicklingError)
"""No folder can be written ("no locator available"), the disk is full, or what lies in the cache was cut off by a crash."""
AHEAD = 32
"""Entries that the decoder looks ahead."""


def compiled(signature: Any) -> Callable[[F], F]:
    """njit without the GIL, from the cache on disk where one can be written."""

    def decorate(function: F) -> F:
        try:
            return njit(signature, nogil=True, cache=True)(function)  # type: ignore[no-any-return]
        except _NO_CACHE:
            return njit(signature, nogil=True)(function)  # type: ignore[no-any-return]

    return decorate


def inlined(function: F) -> F:
    return njit(inline="always")(function)  # type: ignore[no-any-return]


@inlined
def _key(bits: Any, flips: Any) -> Any:
    """`flips` is 0xFFFF for sign-magnitude elements, 0 for integers."""
    return bits ^ ((-(bits >> 15) | 0x8000) & flips)


@inlined
def _unkey(key: Any, flips: Any) -> Any:
    return key ^ ((((key >> 15) - 1) | 0x8000) & flips)


@compiled(types.void(READ, READ, U64, U64, I64, STATE, POSITIONS, WRITE, WRITE, WRITE, WRITE, WRITE))
def encode(
    a: Any,
    b: Any,
    start: Any,
    stop: Any,
    flips: Any,
    state: Any,
    found: Any,
    gaps: Any,
    codes: Any,
    small: Any,
    low: Any,
    high: Any,
) -> None:
    """Append the entries of elements start..stop, fewer than 2**32, to the streams, which have room for every element."""
    last, k, c, s, e = state[0], state[1], state[2], state[3], state[4]
    i = start
    while i < stop:
        # First the positions. Two slots are always written and the count added after: a branch on "this block has a
        # change" would be mispredicted at 0.1-5 %.
        total = _u(0)
        blocks = min(_u(BLOCKS), (stop - i) >> _u(5))
        for q in range(blocks):
            at = i + (q << _u(5))
            here = at - start
            mask = differing(a, b, at + at)
            r = total
            total += ones(mask)
            found[r] = here + trailing_zeros(mask)
            mask &= mask - _u(1)
            found[r + _u(1)] = here + trailing_zeros(mask)
            mask &= mask - _u(1)
            r += _u(2)
            while mask != _u(0):
                found[r] = here + trailing_zeros(mask)
                r += _u(1)
                mask &= mask - _u(1)
        i += blocks << _u(5)
        if blocks < _u(BLOCKS):
            while i < stop:
                if load(a, i + i) != load(b, i + i):
                    found[total] = i - start
                    total += _u(1)
                i += _u(1)
        for q in range(total):
            p = _u(found[q]) + start
            gap = p - last - _u(1)
            last = p
            while gap >= _u(255):
                gaps[k] = 255
                k += _u(1)
                gap -= _u(255)
            gaps[k] = gap
            k += _u(1)
            d = _key(load(b, p + p), flips) - _key(load(a, p + p), flips)
            d = ((d & 0xFFFF) ^ 0x8000) - 0x8000
            y = ((d << 1) ^ (d >> 63)) - 1
            code = min(y, 3)
            if c & _u(3):
                codes[c >> _u(2)] |= code << np.int64((c & _u(3)) << _u(1))
            else:
                codes[c >> _u(2)] = code
            c += _u(1)
            if code == 3:
                rest = y - 3
                small[s] = min(rest, 255)
                s += _u(1)
                if rest >= 255:
                    low[e] = rest & 255
                    high[e] = rest >> 8
                    e += _u(1)
    state[0], state[1], state[2], state[3], state[4] = last, k, c, s, e


@compiled(types.boolean(WRITE, U64, U64, I64, STATE, POSITIONS, READ, READ, READ, READ, READ))
def decode(
    w: Any, start: Any, stop: Any, flips: Any, state: Any, found: Any, gaps: Any, codes: Any, small: Any, low: Any, high: Any
) -> bool:
    """Apply the entries of elements start..stop, fewer than 2**32, of w in place. False for streams that end too early: then w is
    half changed."""
    n_gaps, n_codes, n_small, n_low = _u(gaps.size), _u(codes.size), _u(small.size), _u(low.size)
    p, k, c, s, e = state[0], state[1], state[2], state[3], state[4]
    more = True
    while more:
        # First the positions of some entries, asking for their cache lines: most of the time would go into waiting for them.
        total = _u(0)
        more = False
        while k < n_gaps:
            gap = _u(gaps[k])
            if gap == _u(255):
                p += gap
                k += _u(1)
                continue
            q = p + gap + _u(1)
            if q >= stop:
                break
            if total == _u(AHEAD):
                more = True
                break
            p = q
            k += _u(1)
            prefetch(w, q + q)
            found[total] = q - start
            total += _u(1)
        if (c + total + _u(3)) >> _u(2) > n_codes:
            return False
        for r in range(total):
            y = np.int64((codes[c >> _u(2)] >> ((c & _u(3)) << _u(1))) & _u(3))
            c += _u(1)
            if y == 3:
                if s >= n_small:
                    return False
                y = np.int64(small[s])
                s += _u(1)
                if y == 255:
                    if e >= n_low:
                        return False
                    y = np.int64(low[e]) | (np.int64(high[e]) << 8)
                    e += _u(1)
                y += 3
            z = (y + 1) & 0xFFFF
            d = (z >> 1) ^ -(z & 1)
            at = (_u(found[r]) + start) << _u(1)
            store(w, at, _unkey((_key(load(w, at), flips) + d) & 0xFFFF, flips))
    state[0], state[1], state[2], state[3], state[4] = p, k, c, s, e
    return True


@compiled(types.int64(READ, READ, INDEX))
def positions(a: Any, b: Any, out: Any) -> Any:
    """The indices of the elements that differ, into `out` (room for all); their number."""
    n = _u(a.size) >> _u(1)
    total, i = _u(0), _u(0)
    while i + _u(32) <= n:
        mask = differing(a, b, i + i)
        while mask != _u(0):
            out[total] = i + trailing_zeros(mask)
            total += _u(1)
            mask &= mask - _u(1)
        i += _u(32)
    while i < n:
        if load(a, i + i) != load(b, i + i):
            out[total] = i
            total += _u(1)
        i += _u(1)
    return np.int64(total)


@compiled(types.void(READ, READ, INDEX_READ, INDEX, INDEX))
def class_ranks(w: Any, classes: Any, at: Any, ranks: Any, counts: Any) -> None:
    """ranks[j]: how many elements of at[j]'s class stand before it; counts[int64[256]] becomes each class's elements."""
    odd = np.zeros(256, np.int64)  # counting into two tables in turn: an element needn't wait for the one before it
    i = np.int64(0)
    n = np.int64(w.size >> 1)
    for j in range(at.size + 1):
        end = at[j] if j < at.size else n
        while i + 1 < end:
            counts[classes[(load(w, _u(i + i)) >> 7) & 255]] += 1
            odd[classes[(load(w, _u(i + i + 2)) >> 7) & 255]] += 1
            i += 2
        if i < end:
            counts[classes[(load(w, _u(i + i)) >> 7) & 255]] += 1
            i += 1
        if j < at.size:
            mine = classes[(load(w, _u(i + i)) >> 7) & 255]
            ranks[j] = counts[mine] + odd[mine]
    for c in range(256):
        counts[c] += odd[c]


@compiled(types.void(READ, READ, INDEX_READ, INDEX_READ, INDEX, INDEX))
def class_locate(w: Any, classes: Any, ranks: Any, starts: Any, at: Any, counts: Any) -> None:
    """at[j]: the position of rank ranks[j] within its class c, starts[c] <= j < starts[c + 1], ascending; counts as above.
    Places of ranks that don't exist are left as they are."""
    number = starts.size - 1
    left = np.full(256, -1, np.int64)  # elements of the class up to the one that is looked for
    cursor = np.zeros(256, np.int64)
    for c in range(number):
        cursor[c] = starts[c]
        if starts[c] < starts[c + 1]:
            left[c] = ranks[starts[c]]
    for i in range(np.int64(w.size >> 1)):
        value = np.int64(classes[(load(w, _u(i + i)) >> 7) & 255])
        rest = left[value] - 1
        left[value] = rest
        if rest == -1:
            j = cursor[value]
            if j < starts[value + 1]:
                at[j] = i
                cursor[value] = j + 1
                if j + 1 < starts[value + 1]:
                    left[value] = ranks[j + 1] - ranks[j] - 1
    for c in range(number):
        first, found = starts[c], cursor[c]
        if found == first:
            begun = ranks[first] if first < starts[c + 1] else np.int64(-1)
        elif found < starts[c + 1]:
            begun = ranks[found]
        else:
            begun = ranks[found - 1]
        counts[c] = begun - left[c]


@compiled(types.void(types.Array(types.uint16, 1, "C", readonly=True, aligned=False), WRITE, WRITE))
def split(values: Any, low: Any, high: Any) -> None:
    """Low bytes and high bytes."""
    for i in range(low.size):
        low[i] = values[i] & 255
        high[i] = values[i] >> 8
