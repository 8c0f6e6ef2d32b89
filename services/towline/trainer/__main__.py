"""python -m towline.trainer --config run.toml [--replica ID]"""

from __future__ import annotations

import sys

from towline.runtime.service import service_main
from towline.trainer.service import TrainerService

if __name__ == "__main__":
    sys.exit(service_main(TrainerService))
