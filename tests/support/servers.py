"""Servers of a test's own, for tests that kill, fill or forbid. The session's shared ones are fixtures (tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from towline.local.daemon import Daemon

D = TypeVar("D", bound=Daemon)


def running(server: D) -> Iterator[D]:
    """A started server for a `yield from` fixture; it's gone afterwards, also where its start failed half-way."""
    try:
        server.start()
        yield server
    finally:
        server.kill()  # not stop: nothing here is kept, and the end of a session needn't take seconds
