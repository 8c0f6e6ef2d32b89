"""A trainer of several ranks as one process to whoever supervises it: torchrun starts them here, and all end when one does.

On several machines torchrun is started by hand on each: `torchrun --nnodes … -m towline.trainer --config run.toml`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from towline.config import load_settings
from towline.errors import FencedError, TowlineError, UsageError
from towline.learner.world import place
from towline.runtime.service import PID_VARIABLE, exit_code
from towline.trainer.follower import end_with_parent, run_follower

TELLING = (UsageError.exit_status, FencedError.exit_status)
"""Exit codes that say what to do: one rank's counts, whatever the others ended with."""


def start() -> int | None:
    """The exit code of the ranks that were started here, or None where this process is rank 0 or the only one, as torchrun's
    environment and the settings say. Another rank does its work here and never returns."""
    parser = argparse.ArgumentParser(prog="python -m towline.trainer", add_help=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--replica")
    given, _ = parser.parse_known_args()
    if given.config is None:
        return None
    try:
        rank, size = place()
        if size == 1:
            ranks = load_settings(given.config).trainer.ranks
            return launch(ranks, sys.argv[1:]) if ranks > 1 else None
    except TowlineError as error:
        return exit_code(error)
    end_with_parent()
    if rank > 0:
        run_follower(given.config, given.replica)
    return None


def launch(ranks: int, arguments: list[str]) -> int:
    """Run `ranks` processes of the trainer on this machine to their end; the exit code that says most."""
    try:
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except ModuleNotFoundError as error:
        return exit_code(UsageError(f"no module {error.name!r}: pip install 'towline[torch]'", code="install"))
    os.environ[PID_VARIABLE] = str(os.getpid())
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: the ranks listen for each other alone
    # Its own words would stand after the line with which a rank ends, which is what its supervisor shows.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.main(["--standalone", f"--nproc-per-node={ranks}", "-m", "towline.trainer", *arguments])
    except SignalException:
        return 0
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for rank, code in codes.items():
            if code < 0:
                print(f"rank_lost: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
        return exit_code_of(codes)
    return 0


def exit_code_of(codes: dict[int, int]) -> int:
    """Of the ranks' exit codes, negative where one was killed."""
    for code in TELLING:
        if code in codes.values():
            return code
    code = codes.get(0) or next(iter(codes.values()))
    return code if code > 0 else 1
