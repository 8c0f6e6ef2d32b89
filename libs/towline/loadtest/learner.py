"""A learner without a model: it takes the time of a step and changes weights, so that everything around it is real.

`towline.learner.base.Learner`'s promises hold, also after a restart: weights and steps follow from seed and step alone.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from towline.config import Settings
from towline.delta.files import load_folder, read_safetensors, write_safetensors
from towline.delta.state import ModelState, RawTensor
from towline.errors import CorruptError
from towline.learner.base import StepReport, TrainBatch
from towline.learner.sharing import Place
from towline.loadtest.model import change
from towline.loadtest.plan import read_plan
from towline.loadtest.task import VOCABULARY

WEIGHTS, STATE = "weights.safetensors", "state.json"


class SyntheticLearner:
    """As a run's settings and its plan (`load.json`) say."""

    def __init__(self, folder: Path, settings: Settings, seed: int) -> None:
        self._load = read_plan(settings).trainer
        self._seed = seed
        self._step = 0
        self._state = load_folder(folder)

    @property
    def place(self) -> Place:
        return Place()

    @property
    def step(self) -> int:
        return self._step

    @property
    def vocabulary(self) -> int:
        return VOCABULARY

    def state(self) -> ModelState:
        """Tensors are replaced by a step, never written: what was given out stays."""
        return dict(self._state)

    def train(self, batch: TrainBatch) -> StepReport:
        began = time.perf_counter()
        load, chance = self._load, np.random.default_rng((self._seed, self._step))
        mean = load.step_seconds
        seconds = mean * math.exp(chance.normal(-(load.step_sigma**2) / 2, load.step_sigma)) if load.step_sigma else mean
        tokens = int(batch.policy_tokens.sum())
        seconds += load.seconds_per_token * tokens
        self._state = {
            name: RawTensor(tensor.spec, change(tensor.data, load.changed_share, chance)) for name, tensor in self._state.items()
        }
        self._step += 1
        time.sleep(max(seconds - (time.perf_counter() - began), 0.0))
        return StepReport(for_depth=batch.for_depth, rows=batch.rows, tokens=tokens, optimiser_steps=1)

    def logprobs(self, tokens: Sequence[int], state: ModelState | None = None) -> list[float]:
        return [-math.log(VOCABULARY)] * max(len(tokens) - 1, 0)

    def checkpoint(self) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory(prefix="towline-checkpoint-") as folder:
            path = Path(folder) / WEIGHTS
            write_safetensors(self._state, path)
            return {WEIGHTS: path.read_bytes(), STATE: json.dumps({"step": self._step}).encode()}

    def restore(self, files: Mapping[str, bytes]) -> None:
        try:
            self._state, self._step = read_safetensors(files[WEIGHTS]), int(json.loads(files[STATE])["step"])
        except (KeyError, ValueError) as error:
            raise CorruptError(f"the checkpoint isn't a synthetic learner's: {error}", code="checkpoint") from error
