"""Encoding and decoding of one block, compiled where numba is installed, else in numpy; the bytes are the same.

Both directions call `absorb(view, start, stop)` for each run of a view's bytes once they are final (decoding) or read
(encoding), in order, so that hashing meets them while they are still in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Protocol

from towline.delta import classes, frames, streams
from towline.delta.classes import NumpyScans, Scans
from towline.delta.numbers import Bytes, Unsigned, to_planes
from towline.errors import UsageError

Absorb = Callable[[int, int, int], None]


class Backend(Protocol):
    name: str
    scans: Scans

    def encode(
        self, codec: str, old: Sequence[Bytes], new: Sequence[Bytes], width: int, sign_magnitude: bool, absorb: Absorb
    ) -> tuple[int, list[Bytes]]:
        """(changed elements, streams) of a block whose bytes are those of the views one after another."""

    def pack_planes(self, values: Unsigned) -> list[bytes]:
        """The frames of the planes of the values."""

    def decode(
        self, codec: str, target: Sequence[Bytes], data: Sequence[Bytes], width: int, sign_magnitude: bool, absorb: Absorb
    ) -> int:
        """Apply the streams in place; the number of entries."""


class NumpyBackend:
    name = "numpy"
    scans: Scans = NumpyScans()

    def encode(
        self, codec: str, old: Sequence[Bytes], new: Sequence[Bytes], width: int, sign_magnitude: bool, absorb: Absorb
    ) -> tuple[int, list[Bytes]]:
        before, after = streams.as_elements(old, width), streams.as_elements(new, width)
        if codec == streams.CLASSES:
            positions = streams.changed_positions(before, after)
            out = int(positions.size), classes.encode(before, after, positions, sign_magnitude, self.scans)
        else:
            out = streams.encode(codec, before, after, sign_magnitude)
        for index, view in enumerate(new):
            absorb(index, 0, view.size)
        return out

    def pack_planes(self, values: Unsigned) -> list[bytes]:
        return frames.pack(to_planes(values))

    def decode(
        self, codec: str, target: Sequence[Bytes], data: Sequence[Bytes], width: int, sign_magnitude: bool, absorb: Absorb
    ) -> int:
        bits = streams.as_elements(target, width)
        if codec == streams.CLASSES:
            entries = classes.decode(bits, data, sign_magnitude, self.scans)
        else:
            entries = streams.decode(codec, bits, data, sign_magnitude)
        if len(target) > 1:
            at, flat = 0, bits.view("u1")
            for view in target:
                view[:] = flat[at : at + view.size]
                at += view.size
        for index, view in enumerate(target):
            absorb(index, 0, view.size)
        return entries


@lru_cache(maxsize=4)
def backend(name: str | None = None) -> Backend:
    """`name`: numba, numpy, or None for the fastest that is installed."""
    if name in (None, "numba"):
        if find_spec("numba") is not None:
            from towline.delta.kernels import NumbaBackend

            return NumbaBackend()
        if name is not None:
            raise UsageError("compiled delta kernels need numba: pip install 'towline[fast]'", code="numba_missing")
    if name in (None, "numpy"):
        return NumpyBackend()
    raise UsageError(f"unknown delta backend {name!r}: numba or numpy", code="backend_unknown")
