"""Applying parts to a state in place: every declared size is checked before anything is decompressed, every checksum after."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from towline.delta import classes, frames, streams
from towline.delta.backend import Backend, backend
from towline.delta.checksum import StateHash
from towline.delta.numbers import Bytes, is_sign_magnitude, width_of
from towline.delta.part import Block, PartHead, PartReader, Source, is_piece
from towline.delta.state import ModelState, TensorSpec
from towline.delta.work import PieceHash, TensorHash, default_threads, in_order
from towline.errors import CorruptError, UsageError


@dataclass(slots=True)
class ApplyReport:
    """What was applied and verified."""

    digests: dict[str, str] = field(default_factory=dict)
    """Tensor name -> xxh3-128 of its verified bytes."""
    touched: set[str] = field(default_factory=set)
    """Tensors that the parts changed."""
    changed: int = 0
    elements: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0

    @property
    def density(self) -> float:
        return self.changed / self.elements if self.elements else 0.0


class Journal(Protocol):
    """Told of each range of a tensor's bytes before it is changed; called by several threads, for ranges that don't overlap."""

    def record(self, spec: TensorSpec, first_byte: int, old: Bytes, new: Bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class _Task:
    head: PartHead
    index: int
    block: Block
    specs: tuple[TensorSpec, ...]
    views: list[Bytes]
    packed: list[bytes | memoryview]
    tensor: TensorHash | None


class Coverage:
    """That parts, in order, hold every element of a layout once."""

    def __init__(self, layout: Sequence[TensorSpec]) -> None:
        self._open = {spec.name: spec for spec in layout}
        if len(self._open) != len(layout):
            raise UsageError("the layout names a tensor twice", code="layout_mismatch")
        self._known = dict(self._open)
        self._at: dict[str, int] = {}

    def take(self, block: Block, specs: tuple[TensorSpec, ...]) -> None:
        """The next block, whose rows are `specs`; `CorruptError` with the tensor's name where it doesn't fit."""
        for spec in specs:
            known = self._known.get(spec.name)
            if known is None:
                raise CorruptError(f"tensor {spec.name!r} isn't in the model", code="layout_mismatch")
            if known != spec:
                raise CorruptError(
                    f"tensor {spec.name!r} is {spec.dtype}{list(spec.shape)} in the delta, "
                    f"{known.dtype}{list(known.shape)} in the model",
                    code="layout_mismatch",
                )
            if spec.name not in self._open:
                raise CorruptError(f"tensor {spec.name!r} stands in the delta twice", code="delta_duplicate")
            at = self._at.get(spec.name, 0)
            if at != block.start:
                raise CorruptError(f"tensor {spec.name!r} goes on at element {block.start}, not {at}", code="delta_order")
            if len(specs) > 1:
                del self._open[spec.name]
                continue
            end = block.start + block.count
            self._at[spec.name] = end
            if end == spec.elements:
                del self._open[spec.name]

    def finish(self) -> None:
        if self._open:
            name = min(self._open)
            raise CorruptError(f"tensor {name!r} isn't whole in the delta (a part is missing?)", code="delta_incomplete")


def check_state(state: ModelState, layout: Sequence[TensorSpec]) -> None:
    """`UsageError` unless the state has exactly this layout, writable and without shared memory."""
    specs = {spec.name: spec for spec in layout}
    if specs.keys() != state.keys():
        name = min(specs.keys() ^ state.keys())
        raise UsageError(f"tensor {name!r} is only in the {'layout' if name in specs else 'state'}", code="layout_mismatch")
    spans = []
    for name, tensor in state.items():
        if tensor.spec != specs[name]:
            raise UsageError(f"tensor {name!r} is {tensor.spec}, not {specs[name]} as in the layout", code="layout_mismatch")
        if not tensor.data.flags.writeable or not tensor.data.flags.c_contiguous:
            raise UsageError(f"tensor {name!r} can't be written in place: apply to copy_state(…)", code="state_readonly")
        if tensor.data.size:
            address = tensor.data.__array_interface__["data"][0]
            spans.append((address, address + tensor.data.size, name))
    spans.sort()
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            raise UsageError(f"tensors {first!r} and {second!r} share memory: apply to copy_state(…)", code="state_shared")


def apply_parts(
    state: ModelState,
    parts: Iterable[Source],
    *,
    layout: Sequence[TensorSpec],
    digests: Mapping[str, str] | None,
    threads: int | None,
    backend_name: str | None,
    journal: Journal | None = None,
) -> ApplyReport:
    """As `codec.apply` documents it. With a journal, each block is decoded beside the state and written there once the journal
    knows what it replaces."""
    check_state(state, layout)
    began = time.perf_counter()
    report = ApplyReport()
    worker = _Decoder(backend(backend_name), digests, journal)
    tasks = _tasks(state, parts, Coverage(layout), report)
    for task, checked in in_order(worker.run, tasks, threads or default_threads()):
        report.changed += task.block.changed
        report.elements += task.block.count
        if task.block.changed:
            report.touched.update(spec.name for spec in task.specs)
        report.digests.update(checked)
        if task.tensor is not None and task.block.start + task.block.count == task.specs[0].elements:
            name = task.specs[0].name
            check, digest = task.tensor.result()
            worker.verify(task.head, name, check, digest)
            report.digests[name] = digest
    report.seconds = time.perf_counter() - began
    return report


def _tasks(state: ModelState, parts: Iterable[Source], coverage: Coverage, report: ApplyReport) -> Iterator[_Task]:
    tensor: TensorHash | None = None
    head: PartHead | None = None
    for part in parts:
        reader = PartReader(_counted(part, report))
        if head and (reader.head.table.kind, reader.head.table.checksum) != (head.table.kind, head.table.checksum):
            raise CorruptError("the parts aren't of one delta", code="delta_mixed")
        head = reader.head
        for index, block, packed in reader.blocks():
            specs = head.specs[block.row : block.row + block.rows]
            coverage.take(block, specs)
            views = [state[spec.name].data for spec in specs]
            if is_piece(block, head.specs):
                width = width_of(specs[0].dtype)
                views = [views[0][block.start * width : (block.start + block.count) * width]]
                if block.start == 0 or tensor is None:
                    tensor = TensorHash(head.table.checksum)
                yield _Task(head, index, block, specs, views, packed, tensor)
            else:
                yield _Task(head, index, block, specs, views, packed, None)
    if head is None and state:
        raise CorruptError("there is no part to apply", code="delta_incomplete")
    coverage.finish()


def _counted(part: Source, report: ApplyReport) -> Source:
    if isinstance(part, bytes | bytearray | memoryview):
        report.wire_bytes += len(part)
        return part
    return _count_pieces(part, report)


def _count_pieces(pieces: Iterable[bytes], report: ApplyReport) -> Iterator[bytes]:
    for piece in pieces:
        report.wire_bytes += len(piece)
        yield piece


def unpack_block(block: Block, packed: Sequence[bytes | memoryview], dtype: str) -> list[Bytes]:
    """The block's streams. Every size is checked against what `block.count` elements can need first."""
    width = width_of(dtype)
    if block.codec == streams.CLASSES:
        if width != 2 or not is_sign_magnitude(dtype):
            raise CorruptError(f"codec class doesn't fit dtype {dtype}", code="delta_codec")
        number, rest = divmod(len(packed) - 4, classes.PER_CLASS)
        if rest or not 1 <= number <= 256:
            raise CorruptError(f"{len(packed)} streams where class needs 4 + 4n", code="delta_stream")
        limits = classes.limits(block.count, number)
    else:
        limits = streams.limits(block.codec, block.count, width)
    if len(limits) != len(packed):
        raise CorruptError(f"{len(packed)} streams where {block.codec} has {len(limits)}", code="delta_stream")
    return [frames.decompress(frame, limit) for frame, limit in zip(packed, limits, strict=True)]


class _Decoder:
    def __init__(self, backend: Backend, digests: Mapping[str, str] | None, journal: Journal | None) -> None:
        self._backend = backend
        self._digests = digests
        self._journal = journal

    def run(self, task: _Task) -> tuple[_Task, dict[str, str]]:
        """Apply and verify one block; the digests of the tensors that are whole in it."""
        algorithm, dtype = task.head.table.checksum, task.specs[0].dtype
        first_byte = task.block.start * width_of(dtype)
        piece = PieceHash(algorithm, task.tensor, first_byte, task.views[0]) if task.tensor else None
        hashes = [] if piece else [StateHash(algorithm) for _ in task.specs]
        views = task.views if self._journal is None else [view.copy() for view in task.views]

        def absorb(index: int, start: int, stop: int) -> None:
            (piece or hashes[index]).update(views[index][start:stop])

        try:
            data = unpack_block(task.block, task.packed, dtype)
            entries = self._backend.decode(task.block.codec, views, data, width_of(dtype), is_sign_magnitude(dtype), absorb)
        except CorruptError as error:
            raise CorruptError(f"{_where(task)}: {error}", code=error.code) from error
        if task.block.codec not in (streams.RAW, streams.DIFF) and entries != task.block.changed:
            raise CorruptError(f"{_where(task)}: {entries} entries, {task.block.changed} declared", code="delta_stream")
        if self._journal is not None:
            for spec, old, new in zip(task.specs, task.views, views, strict=True):
                self._journal.record(spec, first_byte, old, new)
                old[:] = new
        if piece is not None:
            if piece.finish() != task.head.block_checks[task.index]:
                raise CorruptError(f"{_where(task)} isn't what was encoded: {_HINT}", code="delta_checksum")
            return task, {}
        digests = {spec.name: each.digest() for spec, each in zip(task.specs, hashes, strict=True)}
        for name, each in zip(digests, hashes, strict=True):
            self.verify(task.head, name, each.check(), digests[name])
        return task, digests

    def verify(self, head: PartHead, name: str, check: bytes, digest: str) -> None:
        """Compare a tensor's final state with what the part and the caller say it is."""
        if check != head.tensor_checks[name]:
            raise CorruptError(f"tensor {name!r} isn't what was encoded: {_HINT}", code="delta_checksum")
        if self._digests is not None and self._digests.get(name) != digest:
            raise CorruptError(f"tensor {name!r} has digest {digest}, not {self._digests.get(name)}", code="delta_digest")


_HINT = "its base is another state, or the delta is damaged"


def _where(task: _Task) -> str:
    if len(task.specs) == 1:
        return f"tensor {task.specs[0].name!r}, elements {task.block.start} to {task.block.start + task.block.count}"
    return f"tensors {task.specs[0].name!r} to {task.specs[-1].name!r}"
