"""`python -m towline.cli.replay_rank ORDER`: one of the ranks of a replay; `towline replay --verify` starts them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

COMMAND = ("-m", "towline.cli.replay_rank")


def main() -> None:
    from towline.cli.source import open_source
    from towline.replay.ranks import run_rank

    code = run_rank(Path(sys.argv[1]), open_source)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: a thread that waits for a rank that is gone would hold up the end of all


if __name__ == "__main__":
    main()
