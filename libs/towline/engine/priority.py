"""Work beside a generating engine: on a thread of its own that yields to the engine's wherever the two want one core."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

_NICE = 5


def background_executor(name: str) -> ThreadPoolExecutor:
    """One thread at low priority; threads that it starts have it too (on Linux, where a thread has a priority of its own)."""
    return ThreadPoolExecutor(1, name, initializer=_lower)


def _lower() -> None:
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
