"""The codecs in plain numpy: elements to streams and back. FORMAT.md says what each stream holds.

This is the reference: `kernels` computes the same bytes faster where it can, and nothing else may. A block's elements come as one
array of unsigned integers; decoding changes it in place. Streams that no encoder writes raise `CorruptError`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from towline.delta.frames import EMPTY
from towline.delta.numbers import (
    Bytes,
    Index,
    Unsigned,
    elements,
    from_planes,
    from_runs,
    key,
    pack,
    to_gaps,
    to_planes,
    to_positions,
    to_runs,
    unkey,
    unpack,
    unzigzag,
    zigzag,
)
from towline.errors import CorruptError

SPARSE, LOW2, DIFF, RAW, CLASSES = "ulp", "low2", "diff", "raw", "class"
ADDITIVE = {SPARSE, DIFF}
"""Codecs whose entries add up, so that they fold without the base."""


def limits(codec: str, count: int, width: int) -> list[int]:
    """The most bytes each stream of a block of `count` elements can hold, in order; exact for diff and raw."""
    runs = count + count // 255 + 1
    if codec == SPARSE:
        return [runs, -(-count // 4), count, *[count] * width]
    if codec == LOW2:
        return [runs, -(-count // 2), count, *[count] * width]
    if codec in (DIFF, RAW):
        return [count] * width
    raise CorruptError(f"unknown codec {codec!r}", code="delta_codec")


# --- steps: what differs, as zigzag differences less one (a difference is never zero) ---


def step_codes(steps: Unsigned) -> list[Bytes]:
    """[codes, small, planes…] of the steps: 0..2 as 2-bit codes, up to 257 as a byte, others whole."""
    codes = np.minimum(steps, 3).astype(np.uint8)
    rest = steps[codes == 3] - steps.dtype.type(3)
    small = np.minimum(rest, 255).astype(np.uint8)
    return [pack(codes, 2), small, *to_planes(rest[small == 255])]


def read_step_codes(streams: Sequence[Bytes], count: int, width: int) -> Unsigned:
    codes = unpack(streams[0], 2, count)
    steps = codes.astype(f"<u{width}")
    escaped = codes == 3
    steps[escaped] = _read_escaped(streams[1], list(streams[2:]), int(escaped.sum()), width)
    return steps


def _read_escaped(small: Bytes, planes: list[Bytes], count: int, width: int) -> Unsigned:
    wide = small == 255
    if small.size != count or any(plane.size != int(wide.sum()) for plane in planes):
        raise CorruptError("streams of different lengths", code="delta_stream")
    rest = small.astype(f"<u{width}")
    rest[wide] = from_planes(planes, width)
    rest += rest.dtype.type(3)
    return rest


def steps_of(old: Unsigned, new: Unsigned, sign_magnitude: bool) -> Unsigned:
    return zigzag_differences(old, new, sign_magnitude) - old.dtype.type(1)


def differences_of(steps: Unsigned) -> Unsigned:
    return unzigzag(steps + steps.dtype.type(1))


def add(old: Unsigned, differences: Unsigned, sign_magnitude: bool) -> Unsigned:
    return unkey(key(old, sign_magnitude) + differences, sign_magnitude)


def changed_positions(old: Unsigned, new: Unsigned) -> Index:
    return np.flatnonzero(old != new)


def encode_sparse(positions: Index, steps: Unsigned) -> list[Bytes]:
    return [to_runs(to_gaps(positions)), *step_codes(steps)]


def read_sparse(streams: Sequence[Bytes], count: int, width: int) -> tuple[Index, Unsigned]:
    """(positions, differences)."""
    positions = read_positions(streams[0], count)
    return positions, differences_of(read_step_codes(streams[1:], positions.size, width))


def read_positions(stream: Bytes, count: int) -> Index:
    positions = to_positions(from_runs(stream))
    if positions.size and positions[-1] >= count:
        raise CorruptError("a position lies outside of its block", code="delta_stream")
    return positions


# --- low2: steps that find the new value from the old one and from the new one alike ---


def encode_low2(old: Unsigned, new: Unsigned, positions: Index, sign_magnitude: bool) -> list[Bytes]:
    before, bits = key(old[positions], sign_magnitude), new[positions]
    after = key(bits, sign_magnitude)
    codes = np.full(positions.size, 5, np.uint8)
    near, byte = _nearest(before, after, 2, 1) == after, _nearest(before, after, 8, 127) == after
    codes[byte] = 4
    codes[near] = (after[near] & after.dtype.type(3)).astype(np.uint8)
    return [
        to_runs(to_gaps(positions)),
        pack(codes, 4),
        (after[codes == 4] & after.dtype.type(255)).astype(np.uint8),
        *to_planes(bits[codes == 5]),
    ]


def decode_low2(target: Unsigned, streams: Sequence[Bytes], sign_magnitude: bool) -> int:
    positions = read_positions(streams[0], target.size)
    codes = unpack(streams[1], 4, positions.size)
    planes, width = list(streams[3:]), target.itemsize
    whole = codes == 5
    wrong = any(plane.size != whole.sum() for plane in planes) or (codes == 4).sum() != streams[2].size
    if wrong or (codes > 5).any():
        raise CorruptError("streams of different lengths", code="delta_stream")
    keys = key(target[positions], sign_magnitude)
    near, byte = codes < 4, codes == 4
    keys[near] = _nearest(keys[near], codes[near].astype(keys.dtype), 2, 1)
    keys[byte] = _nearest(keys[byte], streams[2].astype(keys.dtype), 8, 127)
    bits = unkey(keys, sign_magnitude)
    bits[whole] = from_planes(planes, width)
    target[positions] = bits
    return int(positions.size)


def _nearest(keys: Unsigned, low: Unsigned, bits: int, below: int) -> Unsigned:
    """The key among those from `below` under to 2**bits - 1 - `below` over `keys` that ends in the low bits of `low`."""
    kind = keys.dtype.type
    ahead = (low - keys) & kind((1 << bits) - 1)
    back = kind((1 << bits) % (1 << 8 * keys.itemsize))
    return np.where(ahead > kind((1 << bits) - 1 - below), keys + ahead - back, keys + ahead).astype(keys.dtype)


# --- every element ---


def zigzag_differences(old: Unsigned, new: Unsigned, sign_magnitude: bool) -> Unsigned:
    return zigzag(key(new, sign_magnitude) - key(old, sign_magnitude))


def read_whole(streams: Sequence[Bytes], count: int, width: int) -> Unsigned:
    """The planes of diff or raw as one value an element."""
    if any(stream.size != count for stream in streams):
        raise CorruptError("a stream is shorter than its block", code="delta_stream")
    return from_planes(list(streams), width)


def encode(codec: str, old: Unsigned, new: Unsigned, sign_magnitude: bool) -> tuple[int, list[Bytes]]:
    """(changed elements, streams)."""
    positions = changed_positions(old, new)
    if codec == SPARSE:
        streams = encode_sparse(positions, steps_of(old[positions], new[positions], sign_magnitude))
    elif codec == LOW2:
        streams = encode_low2(old, new, positions, sign_magnitude)
    else:
        streams = to_planes(zigzag_differences(old, new, sign_magnitude) if codec == DIFF else new)
    return int(positions.size), streams if streams[0].size else [EMPTY] * len(streams)


def decode(codec: str, target: Unsigned, streams: Sequence[Bytes], sign_magnitude: bool) -> int:
    """Apply to `target` in place; the number of entries."""
    width = target.itemsize
    if codec == LOW2:
        return decode_low2(target, streams, sign_magnitude)
    if codec == SPARSE:
        positions, differences = read_sparse(streams, target.size, width)
        target[positions] = add(target[positions], differences, sign_magnitude)
        return int(positions.size)
    values = read_whole(streams, target.size, width)
    target[:] = values if codec == RAW else add(target, unzigzag(values), sign_magnitude)
    return int(target.size)


def as_elements(views: Sequence[Bytes], width: int) -> Unsigned:
    """The views' bytes as one array; a copy unless there is one view."""
    return elements(views[0] if len(views) == 1 else np.concatenate(views), width)
