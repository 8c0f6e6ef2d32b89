"""How a model is cut into blocks: large tensors into pieces, small ones of a dtype together, both up to a block's size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from towline.delta.numbers import Bytes, width_of
from towline.delta.state import RawTensor, TensorSpec

BLOCK_BYTES = 8 << 20
DENSE_BLOCK_BYTES = 64 << 20
"""Dense mode: the larger the block, the less its classes' streams cost."""
MAX_BLOCK_BYTES = 1 << 30
_HINT_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Work:
    """A block to encode: `rows` whole tensors, or elements start..start+count of one. `old` is None for a full model."""

    specs: tuple[TensorSpec, ...]
    start: int
    count: int
    old: tuple[Bytes, ...] | None
    new: tuple[Bytes, ...]

    @property
    def is_piece(self) -> bool:
        return len(self.specs) == 1 and self.count != self.specs[0].elements


@dataclass(slots=True)
class _Pack:
    pairs: list[tuple[RawTensor | None, RawTensor]]
    nbytes: int = 0


def cut(pairs: Iterable[tuple[RawTensor | None, RawTensor]], block_bytes: int) -> Iterator[Work]:
    """(base or None, new) tensors as blocks; holds no more than one block per dtype and density."""
    packs: dict[tuple[str, bool], _Pack] = {}
    for old, new in pairs:
        size = new.data.size
        if size > block_bytes:
            yield from _pieces(old, new, block_bytes)
            continue
        key = (new.spec.dtype, old is not None and _looks_dense(old.data, new.data))
        pack = packs.setdefault(key, _Pack([]))
        if pack.nbytes + size > block_bytes:
            yield _whole(pack)
            pack = packs[key] = _Pack([])
        pack.pairs.append((old, new))
        pack.nbytes += size
    for pack in packs.values():
        yield _whole(pack)


def _whole(pack: _Pack) -> Work:
    specs = tuple(new.spec for _, new in pack.pairs)
    old = tuple(old.data for old, _ in pack.pairs if old is not None)
    new = tuple(new.data for _, new in pack.pairs)
    return Work(specs, 0, pack.nbytes // width_of(specs[0].dtype), old if len(old) == len(new) else None, new)


def _pieces(old: RawTensor | None, new: RawTensor, block_bytes: int) -> Iterator[Work]:
    width = width_of(new.spec.dtype)
    for at in range(0, new.data.size, block_bytes):
        end = min(at + block_bytes, new.data.size)
        before = None if old is None else (old.data[at:end],)
        yield Work((new.spec,), at // width, (end - at) // width, before, (new.data[at:end],))


def _looks_dense(old: Bytes, new: Bytes) -> bool:
    """Whether a sample says that most bytes changed: such tensors share no block with sparse ones, but any answer is right."""
    return bool(2 * np.count_nonzero(old[:_HINT_BYTES] != new[:_HINT_BYTES]) > min(old.size, _HINT_BYTES) * 0.4)
