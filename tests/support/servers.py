"""Servers of a test's own, for tests that kill, fill or forbid. The session's shared ones are fixtures (tests/conftest.py)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import TypeVar

from towline.local.daemon import Daemon

D = TypeVar("D", bound=Daemon)

_GUARD = """
import importlib, pathlib, sys
sys.stdin.read()
module, name, folder = sys.argv[1:]
getattr(importlib.import_module(module), name)(pathlib.Path(folder)).kill()
"""


def running(server: D) -> Iterator[D]:
    """A started server for a `yield from` fixture; it's gone afterwards, also where its start failed half-way, and also where
    the test session itself is killed: a guard process then sees the end of its input."""
    kind = type(server)
    guard = subprocess.Popen(
        [sys.executable, "-c", _GUARD, kind.__module__, kind.__qualname__, str(server.folder)],
        stdin=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        server.start()
        yield server
    finally:
        server.kill()  # not stop: nothing here is kept, and the end of a session needn't take seconds
        guard.kill()
        guard.communicate()
