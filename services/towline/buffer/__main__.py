"""python -m towline.buffer --config run.toml [--replica ID]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from towline.buffer.service import BufferService
from towline.runtime.service import run_service


def main() -> int:
    parser = argparse.ArgumentParser(prog="towline.buffer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--replica", default="0")
    arguments = parser.parse_args()
    return run_service(BufferService, arguments.config, arguments.replica)


if __name__ == "__main__":
    sys.exit(main())
