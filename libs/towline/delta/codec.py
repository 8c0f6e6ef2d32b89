"""Weight deltas: what changed between two states of a model, as a few verified files, and back. FORMAT.md has the bytes.

encoding = encode(base, new)                 # or encode(None, new) for the whole model
for part in encoding:                        # parts come while later tensors are still being encoded
    upload(part.name, part.data)
encoding.report                              # digests, density, bytes

apply(state, downloaded_parts, layout=layout_of(state), digests=encoding.report.digests)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from towline.delta.applier import ApplyReport, apply_parts
from towline.delta.backend import backend as choose_backend
from towline.delta.checksum import SIZES, XXH3_128, hasher
from towline.delta.encoder import MAX_PART_BYTES, MODES, EncodedPart, EncodeReport, parts_of
from towline.delta.folding import fold_parts
from towline.delta.part import Source
from towline.delta.plan import MAX_BLOCK_BYTES
from towline.delta.state import ModelState, RawTensor, TensorSpec
from towline.errors import UsageError

__all__ = [
    "MODES",
    "SIZES",
    "XXH3_128",
    "ApplyReport",
    "EncodeReport",
    "EncodedPart",
    "Encoding",
    "allocate",
    "apply",
    "encode",
    "fold",
]


class Encoding(Iterator[EncodedPart]):
    """The parts of one delta, made as they are taken; `report` is complete after the last."""

    def __init__(self, report: EncodeReport, parts: Iterator[EncodedPart]) -> None:
        self.report = report
        self._parts = parts

    def __next__(self) -> EncodedPart:
        return next(self._parts)


def encode(
    base: Mapping[str, RawTensor] | None,
    new: Mapping[str, RawTensor],
    *,
    mode: str = "default",
    max_part_bytes: int = MAX_PART_BYTES,
    checksum: str = XXH3_128,
    base_digest: str | None = None,
    block_bytes: int | None = None,
    threads: int | None = None,
    backend: str | None = None,
) -> Encoding:
    """The delta from `base` to `new`, or with base None the whole of `new`.

    mode: "default" (folds without the base), "dense" (smaller, 2-3x the CPU) or "idempotent" (applying it to its own result,
        or again after a crash half-way, gives the result again).
    max_part_bytes: a part ends before its streams exceed this, unless one block does by itself.
    checksum: algorithm of the checksums inside the parts; `report.digests` are xxh3-128 always.
    base_digest: `model_digest` of the base; recorded, so that `fold` can check that deltas follow each other.
    block_bytes: state bytes a block, a multiple of 8 up to 1 GiB: the unit of parallel work, of piece checksums and of memory.
        At most 2 x threads blocks are in flight.

    `new` may be a lazy mapping: each tensor is asked for once, in the order of the names, as encoding gets there. Neither
    state may change until the last part is taken. At least one part comes, also for an empty model.
    Raises `UsageError` for an unknown mode or checksum, and (from the iteration) for layouts that differ.
    """
    if mode not in MODES:
        raise UsageError(f"unknown delta mode {mode!r}: use one of {', '.join(MODES)}", code="delta_mode")
    if block_bytes is not None and (not 8 <= block_bytes <= MAX_BLOCK_BYTES or block_bytes % 8):
        raise UsageError(
            f"block_bytes must be a multiple of 8, at most {MAX_BLOCK_BYTES}, not {block_bytes}", code="delta_block_bytes"
        )
    hasher(checksum)
    report = EncodeReport()
    parts = parts_of(
        base,
        new,
        report,
        mode=mode,
        checksum=checksum,
        max_part_bytes=max_part_bytes,
        block_bytes=block_bytes,
        threads=threads,
        backend_name=backend,
        base_digest=base_digest,
    )
    return Encoding(report, parts)


def apply(
    state: ModelState,
    parts: Iterable[Source],
    *,
    layout: Sequence[TensorSpec],
    digests: Mapping[str, str] | None,
    threads: int | None = None,
    backend: str | None = None,
) -> ApplyReport:
    """Apply a delta's (or a full model's) parts to `state`, in place, and verify every checksum of the result.

    parts: in their order; each is its bytes, or an iterable of pieces as they arrive. Parts of several encoders over
        disjoint tensors may follow each other. Unchanged tensors are verified too.
    layout: the model's; parts that lack, repeat or add a tensor, or give another dtype or shape, are refused.
    digests: the manifest's xxh3-128 digest of every tensor, compared beside the parts' own; None if there are none.

    Raises `CorruptError` that names the tensor, with `state` partly changed: throw it away, or repair it. `UsageError`
    for a state that hasn't this layout, can't be written or shares memory between tensors.
    """
    return apply_parts(state, parts, layout=layout, digests=digests, threads=threads, backend_name=backend)


def fold(deltas: Sequence[Iterable[Source]], *, max_part_bytes: int = MAX_PART_BYTES) -> Encoding:
    """Deltas that follow each other (each an iterable of its parts) as one, without the base.

    The result proves the last delta's final state: its checksums are that delta's, and applying it verifies them. With a
    full model first, it is a full model. The changes of all deltas but the last are held in memory.
    `report.digests` are empty strings where the last delta's checksums aren't xxh3-128.

    Raises (from the iteration) `CorruptError` for unsound parts, `UsageError` for deltas of modes dense or idempotent, for
    different layouts, and for deltas that are known not to follow each other: apply those to the base and encode anew.
    """
    if not deltas:
        raise UsageError("fold needs at least one delta", code="delta_fold_empty")
    report = EncodeReport()
    return Encoding(report, fold_parts(deltas, report, max_part_bytes))


def warm_up() -> str:
    """Load the compiled kernels (compile them, where no cache holds them yet): for a service's start. The backend's name."""
    return choose_backend().name


def allocate(layout: Iterable[TensorSpec]) -> ModelState:
    """A zeroed state to apply a full model to."""
    return {spec.name: RawTensor(spec, np.zeros(spec.nbytes, np.uint8)) for spec in layout}
