"""A bounded number of blocks in flight over a thread pool, in order; and the hashing of tensors that span blocks."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

from towline.delta.checksum import Bytes, StateHash, hasher

T = TypeVar("T")
R = TypeVar("R")


def default_threads() -> int:
    """The cores that this process may use, at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 16)


def in_order(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """function(item) of each item, in order, with at most 2 x threads items taken and not yet handed out.

    The first error stops it: what runs ends, what waits is dropped, and nothing runs any more when it is raised.
    """
    if threads == 1:
        yield from map(function, items)
        return
    with ExitStack() as stack:
        pool = ThreadPoolExecutor(threads, "delta")
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        flying: deque[Future[R]] = deque()
        for item in items:
            flying.append(pool.submit(function, item))
            if len(flying) >= 2 * threads:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()


class TensorHash:
    """The hash of one tensor whose pieces get ready in any order.

    A piece that is the next in turn is hashed while it is worked on (`claim`, `update`, `release`): its bytes are in the cache
    then. One that isn't is added whole; whichever thread finds it next in turn hashes it, while others go on.
    """

    def __init__(self, algorithm: str) -> None:
        self._hash = StateHash(algorithm)
        self._ready: dict[int, Bytes] = {}
        self._at = 0
        self._lock = threading.Lock()
        self._busy = False
        self.update = self._hash.update

    def claim(self, start: int) -> bool:
        """Whether the caller may `update` with the piece at byte `start`; it must `release` after that."""
        with self._lock:
            if self._busy or self._at != start:
                return False
            self._busy = True
            return True

    def release(self, stop: int) -> None:
        """The claimed piece, up to byte `stop`, is hashed; goes on with what others have added."""
        with self._lock:
            self._at = stop
        self._drain()

    def add(self, start: int, data: Bytes) -> None:
        """The bytes from `start` on are final. They are hashed later, perhaps by another thread."""
        with self._lock:
            self._ready[start] = data
            if self._busy:
                return
            self._busy = True
        self._drain()

    def _drain(self) -> None:
        while True:
            with self._lock:
                piece = self._ready.pop(self._at, None)
                if piece is None:
                    self._busy = False
                    return
                self._at += piece.size
            self._hash.update(piece)

    def result(self) -> tuple[bytes, str]:
        """(checksum, xxh3-128 digest), once every piece was added or released, and each of those calls has returned."""
        return self._hash.check(), self._hash.digest()


class PieceHash:
    """The hash of one piece of a tensor, feeding the tensor's where it can."""

    def __init__(self, algorithm: str, tensor: TensorHash, start: int, data: Bytes) -> None:
        self._hash = hasher(algorithm)
        self._tensor, self._start, self._data = tensor, start, data
        self._claimed = tensor.claim(start)

    def update(self, data: Bytes) -> None:
        self._hash.update(data)
        if self._claimed:
            self._tensor.update(data)

    def finish(self) -> bytes:
        """The piece's checksum, every byte having been given to `update`."""
        if self._claimed:
            self._tensor.release(self._start + self._data.size)
        else:
            self._tensor.add(self._start, self._data)
        return self._hash.digest()
