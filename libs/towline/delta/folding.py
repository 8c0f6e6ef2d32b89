"""Several deltas in a row as one, without the base: differences add up, and a whole tensor replaces what came before.

The result has the blocks and the checksums of the last delta, so it proves the same final state. What is held in memory is
the changes of the deltas before the last, not the model.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from towline.delta import frames, streams
from towline.delta.applier import Coverage, unpack_block
from towline.delta.checksum import XXH3_128
from towline.delta.encoder import EncodedPart, EncodeReport, PartBuilder
from towline.delta.numbers import Index, Unsigned, is_sign_magnitude, to_planes, unzigzag, width_of, zigzag
from towline.delta.part import Block, PartHead, PartReader, Source, is_piece
from towline.delta.plan import Work
from towline.delta.state import TensorSpec, model_digest
from towline.errors import UsageError


@dataclass(frozen=True, slots=True)
class Change:
    """A range of elements: all set to `values`, or `values` added to the keys at `positions` (ascending)."""

    positions: Index | None
    """None: every element is set"""
    values: Unsigned


@dataclass(slots=True)
class _Delta:
    """One of the deltas before the last, in memory."""

    kind: str
    base: str | None
    layout: dict[str, TensorSpec]
    changes: dict[str, list[tuple[int, int, Change]]]
    """Tensor -> (first element, count, change) in order."""
    digest: str | None
    """model_digest of its final state, where its checksums are xxh3-128."""


def fold_parts(deltas: Sequence[Iterable[Source]], report: EncodeReport, max_part_bytes: int) -> Iterator[EncodedPart]:
    """As `codec.fold` documents it."""
    clock = time.perf_counter()
    before = [_read(parts) for parts in deltas[:-1]]
    for first, second in pairwise(before):
        _check_chain(first, second.base, second.kind, second.layout)
    builder: PartBuilder | None = None
    layout: dict[str, TensorSpec] = {}
    checks: dict[str, bytes] = {}
    last_base: str | None = None
    last_kind = "delta"
    for head, index, block, packed, specs in _blocks(deltas[-1]):
        kind = "full" if head.table.kind == "full" or any(delta.kind == "full" for delta in before) else "delta"
        last_base, last_kind = head.table.base, head.table.kind
        if builder is None:
            base = before[0].base if before else head.table.base
            builder = PartBuilder(kind, "default", head.table.checksum, base, report)
        layout.update((spec.name, spec) for spec in specs)
        checks.update((spec.name, head.tensor_checks[spec.name]) for spec in specs if spec.name in head.tensor_checks)
        for work, change in _merge(block, packed, specs, before):
            codec, changed, out = _encode(change, work.count)
            if builder.wire_bytes and builder.wire_bytes + sum(map(len, out)) > max_part_bytes:
                report.seconds += time.perf_counter() - clock
                yield builder.finish()
                clock = time.perf_counter()
            closes = len(specs) > 1 or block.start + block.count == specs[0].elements
            closed = [(checks[spec.name], _digest(head, checks[spec.name])) for spec in work.specs] if closes else []
            builder.add(work, codec, changed, out, closed, head.block_checks.get(index))
    if before:
        _check_chain(before[-1], last_base, last_kind, layout)
    if builder is None:
        builder = PartBuilder("delta", "default", XXH3_128, None, report)
    part = builder.finish()
    report.seconds += time.perf_counter() - clock
    yield part


def _digest(head: PartHead, check: bytes) -> str:
    return check.hex() if head.table.checksum == XXH3_128 else ""


def _check_chain(first: _Delta, base: str | None, kind: str, layout: Mapping[str, TensorSpec]) -> None:
    if first.layout != layout:
        name = min({spec.name for spec in set(first.layout.values()) ^ set(layout.values())})
        raise UsageError(f"tensor {name!r} isn't the same in both deltas: they don't follow each other", code="layout_mismatch")
    if kind != "full" and base is not None and first.digest is not None and base != first.digest:
        raise UsageError("these deltas don't follow each other: one's base isn't the other's result", code="delta_chain")


def _blocks(
    parts: Iterable[Source],
) -> Iterator[tuple[PartHead, int, Block, list[bytes | memoryview], tuple[TensorSpec, ...]]]:
    for part in parts:
        reader = PartReader(part)
        for index, block, packed in reader.blocks():
            if block.codec not in (*streams.ADDITIVE, streams.RAW):
                name, mode = reader.head.specs[block.row].name, reader.head.table.mode
                raise UsageError(
                    f"tensor {name!r} is in a delta of mode {mode}, which folds only over its base: give the base",
                    code="delta_fold_mode",
                )
            yield reader.head, index, block, packed, reader.head.specs[block.row : block.row + block.rows]


def _read(parts: Iterable[Source]) -> _Delta:
    delta = _Delta("delta", None, {}, {}, None)
    checks: dict[str, str] = {}
    for head, _, block, packed, specs in _blocks(parts):
        delta.kind, delta.base = head.table.kind, head.table.base
        at = 0
        change = _change(block, packed, specs[0].dtype)
        for spec in specs:
            size = block.count if is_piece(block, head.specs) else spec.elements
            delta.layout[spec.name] = spec
            delta.changes.setdefault(spec.name, []).append((block.start, size, _slice(change, at, size)))
            at += size
            if spec.name in head.tensor_checks:
                checks[spec.name] = _digest(head, head.tensor_checks[spec.name])
    coverage = Coverage(list(delta.layout.values()))
    for name, changes in delta.changes.items():
        for start, size, _ in changes:
            coverage.take(Block("", 0, 1, start, size, 0, ()), (delta.layout[name],))
    coverage.finish()
    delta.digest = model_digest(checks) if all(checks.values()) else None
    return delta


def _change(block: Block, packed: Sequence[bytes | memoryview], dtype: str) -> Change:
    data, width = unpack_block(block, packed, dtype), width_of(dtype)
    if block.codec == streams.SPARSE:
        return Change(*streams.read_sparse(data, block.count, width))
    values = streams.read_whole(data, block.count, width)
    if block.codec == streams.RAW:
        return Change(None, values)
    positions = np.flatnonzero(values)
    return Change(positions, unzigzag(values[positions]))


def _slice(change: Change, start: int, count: int) -> Change:
    if change.positions is None:
        return Change(None, change.values[start : start + count])
    low, high = np.searchsorted(change.positions, (start, start + count))
    return Change(change.positions[low:high] - start, change.values[low:high])


def _of(delta: _Delta, spec: TensorSpec, start: int, count: int) -> Change:
    """What a delta does to a tensor's elements start..start+count, whatever blocks it has."""
    pieces = []
    for first, size, change in delta.changes[spec.name]:
        low, high = max(first, start), min(first + size, start + count)
        if low < high:
            pieces.append((low - start, high - low, _slice(change, low - first, high - low)))
    return _join(pieces, spec.name, width_of(spec.dtype))


def _join(pieces: Sequence[tuple[int, int, Change]], name: str, width: int) -> Change:
    """Neighbouring ranges (first element, count, change) as one."""
    if pieces and all(change.positions is None for _, _, change in pieces):
        return Change(None, np.concatenate([change.values for _, _, change in pieces]))
    positions = [change.positions + at for at, _, change in pieces if change.positions is not None]
    if len(positions) != len(pieces):
        raise UsageError(
            f"tensor {name!r} is whole in some blocks of a delta, and cut elsewhere by another: give the base",
            code="delta_fold_mixed",
        )
    empty: Unsigned = np.empty(0, f"<u{width}")
    values = [change.values for _, _, change in pieces]
    return Change(np.concatenate([np.empty(0, np.int64), *positions]), np.concatenate([empty, *values]))


def _then(first: Change, second: Change, sign_magnitude: bool) -> Change:
    """`first`, then `second`, on the same elements."""
    if second.positions is None:
        return second
    if first.positions is None:
        values = first.values.copy()
        values[second.positions] = streams.add(values[second.positions], second.values, sign_magnitude)
        return Change(None, values)
    positions, inverse = np.unique(np.concatenate([first.positions, second.positions]), return_inverse=True)
    total = np.zeros(positions.size, first.values.dtype)
    total[inverse[: first.positions.size]] = first.values
    total[inverse[first.positions.size :]] += second.values
    return Change(positions[total != 0], total[total != 0])


def _merge(
    block: Block, packed: Sequence[bytes | memoryview], specs: tuple[TensorSpec, ...], before: Sequence[_Delta]
) -> Iterator[tuple[Work, Change]]:
    """The last delta's block with all earlier changes under it; a pack is split where set tensors meet added ones."""
    sign = is_sign_magnitude(specs[0].dtype)
    whole = _change(block, packed, specs[0].dtype)
    group: list[TensorSpec] = []
    pieces: list[tuple[int, int, Change]] = []
    at = held = 0
    for spec in specs:
        size = block.count if len(specs) == 1 else spec.elements
        change = _slice(whole, at, size)
        for delta in reversed(before if size else ()):
            if change.positions is not None:
                change = _then(_of(delta, spec, block.start, size), change, sign)
        if size and pieces and (pieces[-1][2].positions is None) != (change.positions is None):
            yield _joined(group, block.start, held, pieces)
            group, pieces, held = [], [], 0
        group.append(spec)
        if size:
            pieces.append((held, size, change))
        at, held = at + size, held + size
    yield _joined(group, block.start, held, pieces)


def _joined(group: list[TensorSpec], start: int, count: int, pieces: Sequence[tuple[int, int, Change]]) -> tuple[Work, Change]:
    return Work(tuple(group), start, count, None, ()), _join(pieces, group[0].name, width_of(group[0].dtype))


def _encode(change: Change, count: int) -> tuple[str, int, list[bytes]]:
    """(codec, changed, frames), the smallest of those that need no base."""
    if change.positions is None:
        return streams.RAW, count, frames.pack(to_planes(change.values))
    steps = zigzag(change.values) - change.values.dtype.type(1)
    options = [
        (
            streams.SPARSE,
            frames.pack(streams.encode_sparse(change.positions, steps)) if steps.size else [b""] * (3 + steps.itemsize),
        )
    ]
    if change.positions.size > count // 16:
        every = np.zeros(count, change.values.dtype)
        every[change.positions] = zigzag(change.values)
        options.append((streams.DIFF, frames.pack(to_planes(every))))
    codec, out = min(options, key=lambda option: sum(map(len, option[1])))
    return codec, int(change.positions.size), out
