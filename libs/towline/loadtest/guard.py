"""Ends the servers that a transport load test started where it was killed: they outlive whoever starts them.

As a program (`python -m towline.loadtest.guard FOLDER`) it waits for the end of its standard input, a pipe that the load test
holds open: the kernel closes it however that ends, SIGKILL included.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from towline.local.servers import NatsServer, S3Server

NATS, S3 = "nats", "s3"
"""Folders of the servers within the load test's."""
_CLEAN = b"clean"


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Whatever server is started in `folder` meanwhile ends with this process."""
    guard = subprocess.Popen([sys.executable, "-m", __name__, str(folder)], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        guard.communicate(_CLEAN)


def main(folder: Path) -> None:
    if sys.stdin.buffer.read() == _CLEAN:
        return
    for server in (NatsServer(folder / NATS), S3Server(folder / S3)):
        if server.pid is not None:
            server.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
