"""Processes that are the ranks of one world, as torchrun would start them but without its own start-up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run_ranks(script: Path, arguments: list[str], size: int, seconds: float = 280.0) -> None:
    """Run the script as `size` ranks to their end; the assertion has what a rank that failed said last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    command = [sys.executable, str(script), *arguments]
    ranks = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=seconds)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [f"rank {number}: {said[number][-3000:]}" for number, rank in enumerate(ranks) if rank.returncode]
    assert not failed, "\n".join(failed)
