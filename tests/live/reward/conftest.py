"""A run's bus, and trajectories to be scored on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from towline.bus.client import Bus
from towline.config import BusSettings
from towline.contract.task import PromptRef, SamplingParams, VersionSpan
from towline.contract.trajectory import Segment, Timings, Trajectory


@pytest.fixture
async def bus(bus_settings: BusSettings, run_name: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test-reward")
    await bus.ensure()
    yield bus
    await bus.close()


@pytest.fixture
def make_trajectory(run_name: str) -> Callable[..., Trajectory]:
    def make(group: int = 1, sample: int = 0, *, size: int = 1, answer: int = 5, **reference: object) -> Trajectory:
        nan = np.nan
        return Trajectory(
            run=run_name, lane="train", group=group, sample=sample, group_size=size, task_sequence=10 * group + sample,
            attempt=0, prompt_ref=PromptRef("test", 0, group), reference=reference, tokens=np.array([1, 4, answer, 2], np.int32),
            loss_mask=np.array([0, 0, 1, 1], np.uint8), logprobs=np.array([nan, nan, -0.5, -0.1], np.float32),
            version_spans=(VersionSpan(2, 4, 3, "start"),), segments=(Segment(0, 2, "prompt"), Segment(2, 4, "policy")),
            finish="stop", sampling=SamplingParams(max_tokens=4), seed=1, engine="torch", replica="w",
            timings=Timings(pulled_at=1.0, finished_at=2.0),
        )  # fmt: skip

    return make
