"""What the weight plane is compared with: other ways to send the same step, and the least that any could need."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import zstandard

from towline.delta.numbers import elements, width_of
from towline.delta.state import ModelState
from towline.delta.streams import steps_of


def xor_zstd(base: ModelState, new: ModelState) -> tuple[int, float]:
    """(bytes, seconds) of XOR and zstd-1 of each tensor, as miles, slime and SkyRL send it; checksums not counted."""
    compressor = zstandard.ZstdCompressor(level=1)
    began = time.perf_counter()
    size = 0
    for name, tensor in new.items():
        difference: npt.NDArray[np.uint8] = np.bitwise_xor(base[name].data, tensor.data)
        if difference.any():
            size += len(compressor.compress(difference.data))
    return size, time.perf_counter() - began


def full_zstd(base: ModelState, new: ModelState) -> tuple[int, float]:
    """(bytes, seconds) of the whole model through zstd-1, gathered in one file's bytes; checksums not counted."""
    compressor = zstandard.ZstdCompressor(level=1)
    began = time.perf_counter()
    size = len(b"".join([compressor.compress(tensor.data.data) for tensor in new.values()]))
    return size, time.perf_counter() - began


def entropy_bound(base: ModelState, new: ModelState) -> float:
    """Bytes of the base-free bound: in each tensor changes fall independently at its density, and every step is drawn from the
    model's distribution of steps."""
    positions = 0.0
    steps = []
    for name, tensor in new.items():
        width = width_of(tensor.spec.dtype)
        old, bits = elements(base[name].data, width), elements(tensor.data, width)
        at = np.flatnonzero(old != bits)
        if at.size and old.size:
            positions += old.size * _entropy(np.array([at.size, old.size - at.size]))
            steps.append(steps_of(old[at], bits[at], True))
    drawn = np.unique(np.concatenate(steps), return_counts=True)[1]
    return (positions + float(drawn.sum()) * _entropy(drawn)) / 8


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def best_of(runs: int, function: Callable[[], object]) -> float:
    """The least seconds of some runs."""
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)
