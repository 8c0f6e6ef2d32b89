"""python -m towline.reward --config run.toml [--replica ID]"""

from __future__ import annotations

from towline.reward.service import RewardService
from towline.runtime.service import service_main

if __name__ == "__main__":
    service_main(RewardService)
