"""Publisher processes one after another, each a fork of one that has imported everything, so that a start costs little.

Standard input: a line a life, its `TOWLINE_FAULT` or nothing. Standard output: its process ID, then its exit code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from towline import faults
from towline.delta.backend import backend
from towline.publisher.service import PublisherService
from towline.runtime.service import run_service


def main() -> None:
    backend()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            if fault := line.strip():
                os.environ[faults.VARIABLE] = fault
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os._exit(run_service(PublisherService, Path(sys.argv[1]), "0"))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
