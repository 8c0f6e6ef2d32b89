"""Encoding: blocks in parallel, each with the smallest codec that its mode allows, gathered into parts as they fill."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import xxhash

from towline.delta import frames, streams
from towline.delta.backend import Absorb, Backend, backend
from towline.delta.checksum import StateHash
from towline.delta.numbers import is_sign_magnitude, width_of
from towline.delta.part import Block, Table, write_part
from towline.delta.plan import BLOCK_BYTES, DENSE_BLOCK_BYTES, Work, cut
from towline.delta.state import RawTensor, TensorSpec
from towline.delta.work import PieceHash, TensorHash, default_threads, in_order
from towline.errors import UsageError

MODES = {
    "default": streams.SPARSE,
    "dense": streams.CLASSES,
    "idempotent": streams.LOW2,
}
"""Mode -> the codec for a sparse change; the others stand in where they are smaller."""
MAX_PART_BYTES = 256 << 20
_TRY_OTHERS_ABOVE = 1 / 6
"""Share of a block's bytes above which a sparse codec's rivals are tried."""
_CLASS_WIDTH = 2


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """One file of a delta or of a full model."""

    name: str
    """part-00000.safetensors, part-00001.safetensors, …: the order to apply them in"""
    data: bytes
    digest: str
    """xxh3-128 of `data`, 32 hex digits"""


@dataclass(slots=True)
class EncodeReport:
    """What was encoded; complete once the last part was taken."""

    digests: dict[str, str] = field(default_factory=dict)
    """Tensor name -> xxh3-128 of its final bytes, as `RawTensor.digest` gives it."""
    layout: list[TensorSpec] = field(default_factory=list)
    codecs: dict[str, str] = field(default_factory=dict)
    """Tensor name -> codec, or several joined by "+" in a tensor of several blocks; "same" where nothing changed."""
    changed: int = 0
    elements: int = 0
    model_bytes: int = 0
    wire_bytes: int = 0
    parts: int = 0
    seconds: float = 0.0
    """Time inside the encoder, the caller's use of the parts left out."""

    @property
    def density(self) -> float:
        """Changed elements / elements, 0 for an empty model."""
        return self.changed / self.elements if self.elements else 0.0

    @property
    def codec(self) -> str:
        """The codecs that were used, joined by "+"."""
        return "+".join(sorted({name for codec in self.codecs.values() for name in codec.split("+")})) or "same"


@dataclass(frozen=True, slots=True)
class _Done:
    work: Work
    codec: str
    changed: int
    packed: list[bytes]
    piece_check: bytes | None
    checks: list[tuple[bytes, str]]
    """(checksum, digest) of each whole tensor of the block"""
    tensor: TensorHash | None


def parts_of(
    base: Mapping[str, RawTensor] | None,
    new: Mapping[str, RawTensor],
    report: EncodeReport,
    *,
    mode: str,
    checksum: str,
    max_part_bytes: int,
    block_bytes: int | None,
    threads: int | None,
    backend_name: str | None,
    base_digest: str | None,
) -> Iterator[EncodedPart]:
    """The parts, as `codec.encode` documents them; fills `report`."""
    worker = _Encoder(backend(backend_name), "full" if base is None else mode, checksum)
    size = block_bytes or (DENSE_BLOCK_BYTES if worker.mode == "dense" else BLOCK_BYTES)
    kind = "full" if base is None else "delta"
    gathered = PartBuilder(kind, mode, checksum, base_digest, report)
    clock = time.perf_counter()
    works = worker.prepare(cut(_pairs(base, new), size))
    for done in in_order(worker.run, works, threads or default_threads()):
        spilled = sum(map(len, done.packed))
        if gathered.wire_bytes and gathered.wire_bytes + spilled > max_part_bytes:
            report.seconds += time.perf_counter() - clock
            yield gathered.finish()
            clock = time.perf_counter()
        gathered.add(done.work, done.codec, done.changed, done.packed, _checks(done), done.piece_check)
    part = gathered.finish()
    report.seconds += time.perf_counter() - clock
    yield part


def _checks(done: _Done) -> list[tuple[bytes, str]]:
    last = done.tensor is not None and done.work.start + done.work.count == done.work.specs[0].elements
    return [done.tensor.result()] if last and done.tensor else done.checks


def _pairs(base: Mapping[str, RawTensor] | None, new: Mapping[str, RawTensor]) -> Iterator[tuple[RawTensor | None, RawTensor]]:
    if base is not None and base.keys() != new.keys():
        name = sorted(base.keys() ^ new.keys())[0]
        where = "the base" if name in base else "the new state"
        raise UsageError(f"tensor {name!r} is only in {where}: a delta needs the same layout", code="layout_mismatch")
    for name in sorted(new):
        tensor = new[name]
        old = None if base is None else base[name]
        if tensor.spec.name != name or (old is not None and old.spec != tensor.spec):
            was = old.spec if old is not None else name
            raise UsageError(f"tensor {name!r} has another layout: {was} and {tensor.spec}", code="layout_mismatch")
        yield old, tensor


class PartBuilder:
    """Gathers encoded blocks into one part at a time."""

    def __init__(self, kind: str, mode: str, checksum: str, base: str | None, report: EncodeReport) -> None:
        self._fixed = (kind, mode, checksum, base)
        self._report = report
        self._clear()

    def _clear(self) -> None:
        self._specs: list[TensorSpec] = []
        self._blocks: list[Block] = []
        self._frames: list[bytes] = []
        self._closed: list[bytes] = []
        self._piece_checks: list[bytes] = []
        self.wire_bytes = 0

    def add(
        self,
        work: Work,
        codec: str,
        changed: int,
        packed: list[bytes],
        checks: list[tuple[bytes, str]],
        piece_check: bytes | None,
    ) -> None:
        """One block. `checks`: those of the tensors that end with it; `piece_check`: its own, where it is a piece."""
        opened = not (self._specs and work.start and self._specs[-1].name == work.specs[0].name)
        if opened:
            self._specs += work.specs
        row = len(self._specs) - len(work.specs)
        sizes = tuple(map(len, packed))
        self._blocks.append(Block(codec, row, len(work.specs), work.start, work.count, changed, sizes))
        self._frames += packed
        self.wire_bytes += sum(sizes)
        self._closed += [check for check, _ in checks]
        if piece_check is not None:
            self._piece_checks.append(piece_check)
        self._count(work, codec, changed, checks)

    def _count(self, work: Work, codec: str, changed: int, checks: list[tuple[bytes, str]]) -> None:
        report = self._report
        report.changed += changed
        report.elements += work.count
        report.model_bytes += work.count * width_of(work.specs[0].dtype)
        if work.start == 0:
            report.layout += work.specs
        for spec in work.specs:
            if not changed:
                report.codecs.setdefault(spec.name, "same")
                continue
            if spec.name not in report.codecs:
                report.codecs[spec.name] = codec
                continue
            used = {codec, *report.codecs[spec.name].split("+")} - {"same"}
            report.codecs[spec.name] = "+".join(sorted(used))
        if checks:
            report.digests.update({spec.name: digest for spec, (_, digest) in zip(work.specs, checks, strict=True)})

    def finish(self) -> EncodedPart:
        """The part that was gathered; the next one is open then."""
        kind, mode, checksum, base = self._fixed
        rows = tuple((spec.name, spec.dtype, spec.shape) for spec in self._specs)
        table = Table(kind, mode, checksum, base, rows, tuple(self._blocks))
        data = write_part(table, b"".join(self._closed + self._piece_checks), self._frames)
        name = f"part-{self._report.parts:05d}.safetensors"
        self._report.parts += 1
        self._report.wire_bytes += len(data)
        self._clear()
        return EncodedPart(name, data, xxhash.xxh3_128_hexdigest(data))


class _Encoder:
    """Encodes one block; any number of threads may be in it."""

    def __init__(self, backend: Backend, mode: str, checksum: str) -> None:
        self.mode = mode
        self._backend = backend
        self._checksum = checksum

    def prepare(self, works: Iterator[Work]) -> Iterator[tuple[Work, TensorHash | None]]:
        """Each block with the hash that it shares with the tensor's other pieces."""
        tensor: TensorHash | None = None
        for work in works:
            if not work.is_piece:
                yield work, None
                continue
            if work.start == 0:
                tensor = TensorHash(self._checksum)
            yield work, tensor

    def run(self, item: tuple[Work, TensorHash | None]) -> _Done:
        work, tensor = item
        first_byte = work.start * width_of(work.specs[0].dtype)
        piece = PieceHash(self._checksum, tensor, first_byte, work.new[0]) if tensor else None
        hashes = [] if piece else [StateHash(self._checksum) for _ in work.specs]

        def absorb(index: int, start: int, stop: int) -> None:
            (piece or hashes[index]).update(work.new[index][start:stop])

        codec, changed, packed = self._smallest(work, absorb)
        checks = [(each.check(), each.digest()) for each in hashes]
        return _Done(work, codec, changed, packed, piece.finish() if piece else None, checks, tensor)

    def _smallest(self, work: Work, absorb: Absorb) -> tuple[str, int, list[bytes]]:
        dtype = work.specs[0].dtype
        width, sign = width_of(dtype), is_sign_magnitude(dtype)
        if work.old is None:
            for index, view in enumerate(work.new):
                absorb(index, 0, view.size)
            return streams.RAW, work.count, self._backend.pack_planes(streams.as_elements(work.new, width))
        first = streams.LOW2 if self.mode == "idempotent" else streams.SPARSE
        changed, data = self._backend.encode(first, work.old, work.new, width, sign, absorb)
        best = (first, frames.pack(data))
        if not changed:
            return first, 0, best[1]
        if self.mode == "dense" and width == _CLASS_WIDTH and sign:
            _, data = self._backend.encode(streams.CLASSES, work.old, work.new, width, sign, _ignore)
            best = min(best, (streams.CLASSES, frames.pack(data)), key=_size)
        if _size(best) > work.count * width * _TRY_OTHERS_ABOVE:
            best = min([best, *self._others(work, width, sign)], key=_size)
        return best[0], changed, best[1]

    def _others(self, work: Work, width: int, sign: bool) -> Iterator[tuple[str, list[bytes]]]:
        after = streams.as_elements(work.new, width)
        yield streams.RAW, self._backend.pack_planes(after)
        if self.mode != "idempotent" and work.old is not None:
            differences = streams.zigzag_differences(streams.as_elements(work.old, width), after, sign)
            yield streams.DIFF, self._backend.pack_planes(differences)


def _ignore(index: int, start: int, stop: int) -> None:
    """Hashed already."""


def _size(option: tuple[str, list[bytes]]) -> int:
    return sum(map(len, option[1]))
