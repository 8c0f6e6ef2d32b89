"""What only the cyclic collector would free: objects that refer to each other stay until it looks, seconds or minutes later."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def left_for_the_collector() -> Iterator[list[str]]:
    """Afterwards the list has the type of each object that was made meanwhile and can't be reached, though it isn't freed."""
    gc.collect()
    gc.disable()
    found: list[str] = []
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.extend(type(one).__qualname__ for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
