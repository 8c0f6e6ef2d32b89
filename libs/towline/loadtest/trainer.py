"""python -m towline.loadtest.trainer --config run.toml: the trainer service with the synthetic learner.

Everything but the arithmetic is the real one: lease, epoch, rows by digest, staleness, staging, checkpoints.
"""

from __future__ import annotations

from towline.bus.client import Bus
from towline.config import Settings
from towline.runtime.service import service_main
from towline.store.objects import ObjectStore
from towline.trainer.service import TrainerService

LEARNER = "towline.loadtest.learner:SyntheticLearner"


class SyntheticTrainer(TrainerService):
    """The trainer of a load test."""

    def __init__(self, settings: Settings, *, bus: Bus, objects: ObjectStore, replica: str) -> None:
        # Not a value of the settings file: no run takes it by accident.
        trainer = settings.trainer.model_copy(update={"backend": LEARNER})
        super().__init__(settings.model_copy(update={"trainer": trainer}), bus=bus, objects=objects, replica=replica)


if __name__ == "__main__":
    service_main(SyntheticTrainer)
