"""Elements as integers whose order is the numbers' order, and the small integer codings that streams are made of.

`key` maps an element's bits to an unsigned integer of the same width, one to one: for floats so that the next
representable number is the next integer (-0 just below +0, NaN payloads at the ends), for integers the bits themselves.
Differences of keys wrap at the width, so they add up over any number of deltas. Source of the float order: Herf, "Radix
tricks", 2001.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from towline.delta.state import DTYPE_BYTES
from towline.errors import CorruptError

Bytes = npt.NDArray[np.uint8]
Unsigned = npt.NDArray[np.unsignedinteger[Any]]
Index = npt.NDArray[np.int64]

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGN_MAGNITUDE = {"F8_E5M2", "F8_E4M3", "F16", "BF16", "F32", "F64"}


def width_of(dtype: str) -> int:
    return DTYPE_BYTES[dtype]


def is_sign_magnitude(dtype: str) -> bool:
    """Whether the top bit is a sign and the rest a magnitude."""
    return dtype in _SIGN_MAGNITUDE


def elements(data: Bytes, width: int) -> Unsigned:
    """The bytes as little-endian unsigned integers, without a copy."""
    return data.view(np.dtype(_UNSIGNED[width]).newbyteorder("<"))


def key(bits: Unsigned, sign_magnitude: bool) -> Unsigned:
    """Ordered keys, same dtype and shape."""
    if not sign_magnitude:
        return bits
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.where(bits & top, ~bits, bits ^ top).astype(bits.dtype)


def unkey(keys: Unsigned, sign_magnitude: bool) -> Unsigned:
    """The inverse of `key`."""
    if not sign_magnitude:
        return keys
    top = keys.dtype.type(1 << (8 * keys.itemsize - 1))
    return np.where(keys & top, keys ^ top, ~keys).astype(keys.dtype)


def zigzag(difference: Unsigned) -> Unsigned:
    """0, -1, 1, -2, … (two's complement at the width) -> 0, 1, 2, 3, …"""
    signed = difference.view(f"<i{difference.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * difference.itemsize - 1))).view(difference.dtype)


def unzigzag(value: Unsigned) -> Unsigned:
    one = value.dtype.type(1)
    return (value >> one) ^ (~(value & one) + one)


def to_planes(values: Unsigned) -> list[Bytes]:
    """Byte k of every value, for k = 0 (lowest) to the width."""
    rows = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize)
    return [np.ascontiguousarray(rows[:, k]) for k in range(values.itemsize)]


def from_planes(planes: list[Bytes], width: int) -> Unsigned:
    if any(plane.size != planes[0].size for plane in planes):
        raise CorruptError("byte planes of different lengths", code="delta_stream")
    rows = np.empty((planes[0].size, width), np.uint8)
    for k, plane in enumerate(planes):
        rows[:, k] = plane
    return elements(rows.reshape(-1), width)


def to_runs(values: Index) -> Bytes:
    """Each value as the sum of bytes: 255 means "add 255 and read on", any other byte ends it."""
    over = values // 255
    ends = np.arange(values.size) + np.cumsum(over)
    out = np.full(values.size + int(over.sum()), 255, np.uint8)
    out[ends] = values - 255 * over
    return out


def from_runs(stream: Bytes) -> Index:
    ends = np.flatnonzero(stream != 255)
    if stream.size and (not ends.size or ends[-1] != stream.size - 1):
        raise CorruptError("a run goes on after its stream's end", code="delta_stream")
    before = np.diff(ends, prepend=-1) - 1
    runs: Index = stream[ends] + 255 * before
    return runs


def pack(codes: Bytes, bits: int) -> Bytes:
    """`8 // bits` codes a byte, the first in the lowest bits; the last byte is filled with zeros."""
    each = 8 // bits
    rows = np.zeros((-(-codes.size // each), each), np.uint8)
    rows.reshape(-1)[: codes.size] = codes
    return np.bitwise_or.reduce(rows << (bits * np.arange(each, dtype=np.uint8)), axis=1) if rows.size else rows.reshape(-1)


def unpack(stream: Bytes, bits: int, count: int) -> Bytes:
    each = 8 // bits
    if stream.size != -(-count // each):
        raise CorruptError(f"{stream.size} bytes of codes for {count} values", code="delta_stream")
    codes = (stream[:, None] >> (bits * np.arange(each, dtype=np.uint8))) & ((1 << bits) - 1)
    if codes.size and codes.reshape(-1)[count:].any():
        raise CorruptError("codes go on after the last value", code="delta_stream")
    return codes.reshape(-1)[:count].astype(np.uint8)


def to_positions(gaps: Index) -> Index:
    """Ascending indices from the number of skipped elements before each."""
    return np.cumsum(gaps + 1) - 1


def to_gaps(positions: Index) -> Index:
    return np.diff(positions, prepend=-1) - 1
