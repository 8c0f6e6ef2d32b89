"""Checksums of a tensor's final bytes: xxh3-128 (the default, and what identifies a tensor), blake3 and adler32.

blake3 needs the `blake3` package. adler32 is there for readers of layouts that use it: it is weak, and never identifies
a tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import xxhash

from towline.errors import UsageError

XXH3_128 = "xxh3-128"
SIZES = {XXH3_128: 16, "blake3": 32, "adler32": 4}
"""Algorithm -> bytes of one checksum."""

Bytes = npt.NDArray[np.uint8]


class Hasher(Protocol):
    def update(self, data: Bytes, /) -> object: ...

    def digest(self) -> bytes: ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Bytes) -> None:
        self._value = zlib.adler32(data.data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


def hasher(algorithm: str) -> Hasher:
    """A fresh hasher; `UsageError` for an unknown algorithm or a missing package."""
    if algorithm == XXH3_128:
        return cast(Hasher, xxhash.xxh3_128())
    if algorithm == "adler32":
        return _Adler32()
    if algorithm != "blake3":
        raise UsageError(f"unknown checksum {algorithm!r}: use one of {', '.join(SIZES)}", code="checksum_unknown")
    try:
        package = import_module("blake3")
    except ModuleNotFoundError:
        raise UsageError("checksum blake3 needs the package blake3: pip install blake3", code="checksum_missing") from None
    return cast(Hasher, package.blake3())


class StateHash:
    """Hashes bytes under a part's algorithm and, in the same pass, under xxh3-128."""

    def __init__(self, algorithm: str) -> None:
        self._check = hasher(algorithm)
        self._identity = self._check if algorithm == XXH3_128 else hasher(XXH3_128)
        self.update: Callable[[Bytes], object] = self._check.update if algorithm == XXH3_128 else self._update_both

    def _update_both(self, data: Bytes) -> None:
        self._check.update(data)
        self._identity.update(data)

    def check(self) -> bytes:
        """The checksum that stands in a part."""
        return self._check.digest()

    def digest(self) -> str:
        """xxh3-128 as 32 hex digits, as `RawTensor.digest` gives it."""
        return self._identity.digest().hex()
