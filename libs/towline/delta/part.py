"""A part: a safetensors file that holds a table, checksums and compressed streams. FORMAT.md is the specification.

Writing and reading of the container alone: what the streams mean is in `streams`, what a sequence of parts must add up
to is checked by `apply`. The reader needs no more than the table before it hands out the first block.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import msgspec
import xxhash
import zstandard

from towline.delta import checksum
from towline.delta.state import TensorSpec
from towline.errors import CorruptError, UsageError

FORMAT = "towline-delta"
VERSION = "1"
MAX_HEADER_BYTES = 1024
MAX_TABLE_BYTES = 64 << 20

Source = bytes | bytearray | memoryview | Iterable[bytes]
"""A whole part, or its bytes in pieces of any size as they arrive."""


class Block(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """`rows` whole tensors from row `row` on (start 0), or elements start..start+count of the one tensor `row`."""

    codec: str
    row: int
    rows: int
    start: int
    count: int
    changed: int
    frames: tuple[int, ...]
    """Byte length of each stream's frame, in the codec's order; 0 for an empty stream."""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str
    """delta | full"""
    mode: str
    checksum: str
    base: str | None
    """model_digest of the state it applies to, where the writer knew it."""
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """(name, safetensors dtype, shape) a row, in the order of the blocks."""
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class PartHead:
    """What stands before the streams."""

    table: Table
    specs: tuple[TensorSpec, ...]
    tensor_checks: dict[str, bytes]
    """Final checksum of each tensor whose last element stands in this part."""
    block_checks: dict[int, bytes]
    """Final checksum of each block that is a piece of a tensor."""


def is_piece(block: Block, specs: tuple[TensorSpec, ...]) -> bool:
    """Whether the block is less than a whole tensor."""
    return block.rows == 1 and block.count != specs[block.row].elements


def closed_rows(table: Table, specs: tuple[TensorSpec, ...]) -> list[int]:
    """The rows whose tensor ends in this part, in row order."""
    rows: list[int] = []
    for block in table.blocks:
        if block.rows > 1 or block.start + block.count == specs[block.row].elements:
            rows.extend(range(block.row, block.row + block.rows))
    return rows


def _header(table_bytes: int, checks_bytes: int, frames_bytes: int, digest: str) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": FORMAT, "version": VERSION, "digest": digest}}
    at = 0
    for name, size in (("table", table_bytes), ("checksums", checks_bytes), ("frames", frames_bytes)):
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_part(table: Table, checks: bytes, frames: list[bytes]) -> bytes:
    """The part's bytes. `checks`: the checksums of `closed_rows`, then those of the pieces, in block order."""
    packed = zstandard.ZstdCompressor(level=3).compress(msgspec.json.encode(table))
    digest = xxhash.xxh3_128_hexdigest(packed + checks)
    return b"".join([_header(len(packed), len(checks), sum(map(len, frames)), digest), packed, checks, *frames])


class _Reader:
    """Exact reads over bytes that come in pieces."""

    def __init__(self, source: Source) -> None:
        pieces = [source] if isinstance(source, bytes | bytearray | memoryview) else source
        self._pieces: Iterator[bytes | bytearray | memoryview] = iter(pieces)
        self._piece = memoryview(b"")

    def read(self, size: int) -> bytes | memoryview:
        if size <= len(self._piece):
            out, self._piece = self._piece[:size], self._piece[size:]
            return out
        gathered = bytearray()
        while True:
            take = min(size - len(gathered), len(self._piece))
            gathered += self._piece[:take]
            self._piece = self._piece[take:]
            if len(gathered) == size:
                return bytes(gathered)
            piece = next(self._pieces, None)
            if piece is None:
                raise CorruptError(f"the part ends {size - len(gathered)} bytes too early", code="delta_truncated")
            self._piece = memoryview(piece).cast("B")
            if not gathered and size <= len(self._piece):
                return self.read(size)

    def end(self) -> None:
        if len(self._piece) or any(len(piece) for piece in self._pieces):
            raise CorruptError("the part goes on after its last stream", code="delta_trailing")


class PartReader:
    """Reads `head`, then yields each block with its frames; `CorruptError` for whatever isn't a sound part."""

    def __init__(self, source: Source) -> None:
        self._source = _Reader(source)
        self.head = self._read_head()

    def _read_head(self) -> PartHead:
        read = self._source.read
        start = bytes(read(8))
        size = int.from_bytes(start, "little")
        if size > MAX_HEADER_BYTES:
            raise CorruptError("this isn't a towline-delta part (its header is too long)", code="delta_header")
        text = bytes(read(size))
        try:
            header = json.loads(text)
            meta = header["__metadata__"]
            form, version, digest = meta["format"], meta["version"], meta["digest"]
            sizes = [int(header[name]["shape"][0]) for name in ("table", "checksums", "frames")]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise CorruptError("this isn't a towline-delta part (its header can't be read)", code="delta_header") from error
        if form == FORMAT and version != VERSION:
            raise CorruptError(f"the part has format version {version!r}; this reads {VERSION}", code="delta_version")
        # One header is right for these sizes; comparing whole leaves no bit of it unchecked.
        if form != FORMAT or min(sizes) < 0 or start + text != _header(sizes[0], sizes[1], sizes[2], str(digest)):
            raise CorruptError("the part's header is damaged", code="delta_header")
        if sizes[0] + sizes[1] > MAX_TABLE_BYTES:
            raise CorruptError("the part's table is too large", code="delta_oversize")
        packed, checks = bytes(read(sizes[0])), bytes(read(sizes[1]))
        if xxhash.xxh3_128_hexdigest(packed + checks) != digest:
            raise CorruptError("the part's table is damaged", code="delta_table")
        return _parse_head(packed, checks, sizes[2])

    def blocks(self) -> Iterator[tuple[int, Block, list[bytes | memoryview]]]:
        """(index, block, frames) in order."""
        for index, block in enumerate(self.head.table.blocks):
            yield index, block, [self._source.read(size) for size in block.frames]
        self._source.end()


def _parse_head(packed: bytes, checks: bytes, frames_bytes: int) -> PartHead:
    try:
        if not 0 <= zstandard.frame_content_size(packed) <= MAX_TABLE_BYTES:
            raise CorruptError("the part's table is too large", code="delta_oversize")
        text = zstandard.ZstdDecompressor().decompress(packed, max_output_size=MAX_TABLE_BYTES)
        table = msgspec.json.decode(text, type=Table)
        specs = tuple(TensorSpec(name, dtype, shape) for name, dtype, shape in table.tensors)
    except (zstandard.ZstdError, msgspec.DecodeError, UnicodeDecodeError, UsageError, RecursionError) as error:
        raise CorruptError(f"the part's table can't be read: {error}", code="delta_table") from error
    _check_table(table, specs, frames_bytes)
    if table.checksum not in checksum.SIZES:
        raise CorruptError(f"the part's checksums are of the unknown kind {table.checksum!r}", code="delta_table")
    size = checksum.SIZES[table.checksum]
    closed = closed_rows(table, specs)
    pieces = [index for index, block in enumerate(table.blocks) if is_piece(block, specs)]
    if len(checks) != size * (len(closed) + len(pieces)):
        raise CorruptError("the part has another number of checksums than tensors and pieces", code="delta_table")
    each = [checks[at : at + size] for at in range(0, len(checks), size)]
    tensor_checks = {specs[row].name: check for row, check in zip(closed, each[: len(closed)], strict=True)}
    return PartHead(table, specs, tensor_checks, dict(zip(pieces, each[len(closed) :], strict=True)))


def _check_table(table: Table, specs: tuple[TensorSpec, ...], frames_bytes: int) -> None:
    """The table's blocks cover its rows in order, once, without a hole; sizes are what they say."""
    names: set[str] = set()
    for spec in specs:
        if spec.name in names:
            raise CorruptError(f"tensor {spec.name!r} stands in the part twice", code="delta_duplicate")
        names.add(spec.name)
        if any(size < 0 for size in spec.shape) or prod(spec.shape) >= 1 << 62:
            raise CorruptError(f"tensor {spec.name!r} has an impossible shape", code="delta_table")
    sizes = [spec.elements for spec in specs]
    row, at = 0, None  # `at`: where the open tensor goes on; None between tensors and before the part's first piece
    for block in table.blocks:
        if at is None and row == block.row == 0 and block.rows == 1:
            at = block.start  # a part may begin inside a tensor
        last = block.row + block.rows
        if block.row != row or block.rows < 1 or last > len(specs) or block.start != (at or 0):
            raise CorruptError("the part's blocks don't follow each other", code="delta_table")
        elements = sum(sizes[row:last])
        ends = block.start + block.count == elements
        sound = 0 <= block.count <= elements - block.start and (ends or (block.rows == 1 and block.count > 0))
        if not sound:
            raise CorruptError(f"a block overruns tensor {specs[row].name!r}", code="delta_table")
        if len({spec.dtype for spec in specs[row:last]}) > 1:
            raise CorruptError(f"a block mixes dtypes at tensor {specs[row].name!r}", code="delta_table")
        if min(block.frames, default=0) < 0 or not 0 <= block.changed <= block.count:
            raise CorruptError(f"a block of tensor {specs[row].name!r} has impossible sizes", code="delta_table")
        row, at = (last, None) if ends else (row, block.start + block.count)
    if row + (at is not None) != len(specs):
        raise CorruptError("the part lists tensors that no block covers", code="delta_table")
    if sum(sum(block.frames) for block in table.blocks) != frames_bytes:
        raise CorruptError("the part's streams don't add up to its size", code="delta_table")
