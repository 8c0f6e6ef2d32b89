"""python -m towline.trainer --config run.toml [--replica ID]"""

from __future__ import annotations

from towline.runtime.service import service_main
from towline.trainer.service import TrainerService

if __name__ == "__main__":
    service_main(TrainerService)
