"""python -m towline.rollout_worker --config run.toml [--replica ID]"""

from __future__ import annotations

from towline.rollout_worker.service import RolloutWorkerService
from towline.runtime.service import service_main

if __name__ == "__main__":
    service_main(RolloutWorkerService)
