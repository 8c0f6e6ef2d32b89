"""python -m towline.trainer --config run.toml [--replica ID]: the trainer, the launcher of its ranks, or one of them."""

from __future__ import annotations

import sys

from towline.runtime.service import service_main
from towline.trainer.ranks import start
from towline.trainer.service import TrainerService

if __name__ == "__main__":
    if (code := start()) is not None:
        sys.exit(code)
    service_main(TrainerService)
