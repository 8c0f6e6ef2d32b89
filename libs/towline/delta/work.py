"""A bounded number of blocks in flight over a thread pool, in order; and the hashing of tensors that span blocks."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

from towline.delta.checksum import Bytes, StateHash

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
    """The hash of one tensor whose pieces get ready in any order; whichever thread finds the next one ready goes on."""

    def __init__(self, algorithm: str) -> None:
        self._hash = StateHash(algorithm)
        self._ready: dict[int, Bytes] = {}
        self._at = 0
        self._lock = threading.Lock()
        self._busy = False

    def add(self, start: int, data: Bytes) -> None:
        """The bytes from `start` on are final. They are hashed later, perhaps by another thread."""
        with self._lock:
            self._ready[start] = data
            if self._busy:
                return
            self._busy = True
        while True:
            with self._lock:
                piece = self._ready.pop(self._at, None)
                if piece is None:
                    self._busy = False
                    return
                self._at += piece.size
            self._hash.update(piece)

    def result(self) -> tuple[bytes, str]:
        """(checksum, xxh3-128 digest), once every piece was added and every adder has returned."""
        return self._hash.check(), self._hash.digest()
