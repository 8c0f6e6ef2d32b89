"""One process of a service under one name on a machine: two would overwrite each other's status, and the second would take the
first one's lease for its own, by turns.

Whoever runs under a name holds a socket of that name in Linux's abstract namespace: it's gone with the process, whatever ends it,
and leaves no file. Elsewhere than on Linux, and across machines, nothing is checked: there a replica's name is its host's unless
somebody gives it another.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator

from towline.errors import UsageError

PATIENCE_SECONDS = 10.0
"""For a process that is about to end: its supervisor may start the next one before the kernel has taken it away."""
_POLL_SECONDS = 0.1
_CREDENTIALS = struct.Struct("3i")


@contextlib.asynccontextmanager
async def own_name(run: str, bus_url: str, service: str, replica: str) -> AsyncIterator[None]:
    """Hold the name of this replica of the run's service. `UsageError` (replica_twice) where another process of this user and
    machine holds it, and doesn't end soon."""
    if sys.platform != "linux":
        yield
        return
    digest = hashlib.sha256("\0".join((run, bus_url, service, replica)).encode()).hexdigest()
    address = f"\0towline-{os.getuid()}-{digest[:32]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_SECONDS
        while not _bound(held, address):
            if loop.time() >= until:
                raise UsageError(
                    f"{service} {replica} of run {run} runs on this machine already{_holder(address)}: start this one under "
                    "another name (--replica NAME), or stop that one",
                    code="replica_twice",
                )
            await asyncio.sleep(_POLL_SECONDS)
        held.listen(16)  # so that another one is told who holds it
        yield


def _bound(held: socket.socket, address: str) -> bool:
    try:
        held.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True


def _holder(address: str) -> str:
    """`, as process 123`, if that can be told."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(address)
            pid, _, _ = _CREDENTIALS.unpack(asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        except OSError:
            return ""
    return f", as process {pid}"
