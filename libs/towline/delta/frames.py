"""One zstd frame per stream, with settings for streams that are almost all literals, and bounded decompression."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zstandard

from towline.errors import CorruptError

Bytes = npt.NDArray[np.uint8]
EMPTY: Bytes = np.empty(0, np.uint8)

# Positions and differences hardly repeat: what zstd gains here, it gains by entropy coding. A tiny hash table and long
# matches keep it from breaking literals up for matches that cost more than they save.
_LITERALS = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, window_log=17
)
_context = threading.local()


def compress(stream: Bytes) -> bytes:
    """One zstd frame that states its content size; b"" for an empty stream."""
    if not stream.size:
        return b""
    if not hasattr(_context, "compressor"):
        _context.compressor = zstandard.ZstdCompressor(compression_params=_LITERALS)
    frame: bytes = _context.compressor.compress(stream)
    return frame


def pack(streams: Sequence[Bytes]) -> list[bytes]:
    """The frame of each stream."""
    return [compress(stream) for stream in streams]


def content_size(frame: bytes | memoryview) -> int:
    """What the frame says it holds, 0 for b"". `CorruptError` if it doesn't say."""
    if not len(frame):
        return 0
    try:
        size = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise CorruptError(f"a stream isn't a zstd frame: {error}", code="delta_stream") from error
    if size < 0:
        raise CorruptError("a stream's zstd frame doesn't state its size", code="delta_stream")
    return size


def decompress(frame: bytes | memoryview, limit: int) -> Bytes:
    """uint8[n], n <= `limit`, which is checked before anything is allocated. `CorruptError` for anything else."""
    size = content_size(frame)
    if size > limit:
        raise CorruptError(f"a stream declares {size} bytes where at most {limit} can be", code="delta_oversize")
    if not size:
        if len(frame):
            raise CorruptError("a stream holds an empty frame", code="delta_stream")
        return EMPTY
    if not hasattr(_context, "decompressor"):
        _context.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 20)
    try:
        data = _context.decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptError(f"a stream can't be decompressed: {error}", code="delta_stream") from error
    if len(data) != size:
        raise CorruptError(f"a stream holds {len(data)} bytes and declares {size}", code="delta_stream")
    return np.frombuffer(data, np.uint8)
