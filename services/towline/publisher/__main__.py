"""python -m towline.publisher --config run.toml [--replica ID]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from towline.publisher.service import PublisherService
from towline.runtime.service import run_service


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m towline.publisher", description="Verifies and commits policy versions.")
    parser.add_argument("--config", type=Path, required=True, help="the run's TOML file")
    parser.add_argument("--replica", default="0", help="tells replicas apart")
    arguments = parser.parse_args()
    return run_service(PublisherService, arguments.config, arguments.replica)


if __name__ == "__main__":
    sys.exit(main())
