"""python -m towline.rollout_worker --config run.toml [--replica ID]"""

from __future__ import annotations

import sys

from towline.rollout_worker.service import RolloutWorkerService
from towline.runtime.service import service_main

if __name__ == "__main__":
    sys.exit(service_main(RolloutWorkerService))
