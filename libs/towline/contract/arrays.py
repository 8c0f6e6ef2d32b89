"""Arrays on the wire: little-endian bytes with a declared dtype and element count.

`raw` is the bytes as they are. `planes` splits the elements into byte planes (all first bytes, then all second bytes, …)
and compresses them with zstd, which shortens token IDs and masks; it is used where it is smaller. A reader allocates
what the declared count needs, never what a compressed frame claims.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from towline.errors import MalformedError

Dtype = Literal["<i4", "<f4", "|u1"]
MAX_ELEMENTS = 1 << 26
"""No array of a message holds more: 64 Mi elements, a bound on what a hostile message can make a reader allocate."""

_SMALL_BYTES = 256
_level_1 = zstandard.ZstdCompressor(level=1, write_content_size=True)


class Array(msgspec.Struct, frozen=True, array_like=True):
    """[dtype, count, encoding, data] as it stands in a message."""

    dtype: Dtype
    count: int
    encoding: Literal["raw", "planes"]
    data: bytes


def pack(values: npt.NDArray[np.generic], dtype: Dtype, *, compress: bool = True) -> Array:
    """A one-dimensional array of `dtype` (no silent cast: the caller converts) as an `Array`."""
    if values.ndim != 1 or values.dtype != np.dtype(dtype):
        raise MalformedError(f"an array of {dtype}[n] is needed, got {values.dtype}{list(values.shape)}", code="array")
    raw = np.ascontiguousarray(values).tobytes()
    if compress and len(raw) > _SMALL_BYTES:
        width = values.dtype.itemsize
        planes = np.frombuffer(raw, np.uint8).reshape(-1, width).T.tobytes()
        packed = _level_1.compress(planes)
        if len(packed) < len(raw):
            return Array(dtype, values.size, "planes", packed)
    return Array(dtype, values.size, "raw", raw)


def unpack(array: Array, dtype: Dtype, name: str) -> npt.NDArray[np.generic]:
    """The values, read-only, `dtype`[count]; `MalformedError` names the field where the array isn't what it declares."""
    if array.dtype != dtype:
        raise MalformedError(f"{name}: dtype {array.dtype} where {dtype} is needed", code="array_dtype")
    if not 0 <= array.count <= MAX_ELEMENTS:
        raise MalformedError(f"{name}: {array.count} elements; 0 to {MAX_ELEMENTS} are allowed", code="array_size")
    width = np.dtype(dtype).itemsize
    nbytes = array.count * width
    data = array.data
    if array.encoding == "planes":
        data = np.frombuffer(_decompress(data, nbytes, name), np.uint8).reshape(width, -1).T.tobytes()
    if len(data) != nbytes:
        raise MalformedError(f"{name}: {len(data)} bytes where {array.count} x {width} are declared", code="array_size")
    return np.frombuffer(data, dtype)


def _decompress(data: bytes, nbytes: int, name: str) -> bytes:
    try:
        if zstandard.frame_content_size(data) != nbytes:
            raise MalformedError(f"{name}: the compressed frame isn't the declared {nbytes} bytes", code="array_size")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=max(nbytes, 1))
    except zstandard.ZstdError as error:
        raise MalformedError(f"{name}: the compressed frame can't be read: {error}", code="array") from error
