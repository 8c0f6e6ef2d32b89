"""docs/operations.md, upgrades: recorded bytes of schema 1 in flight are scored; another schema is kept whole, in DEAD."""

from __future__ import annotations

from pathlib import Path

import msgpack

from live.reward.test_scoring import handle_all, outcomes, scorer
from towline.bus.client import Bus
from towline.bus.topology import DEAD
from towline.config import BusSettings
from towline.contract.outcome import Failure, Score

GOLDEN = Path(__file__).parents[2] / "golden" / "contract" / "schema-1" / "trajectory.msgpack"
RUN, GROUP, SAMPLE = "golden", 7, 1
"""As the recorded trajectory says."""


async def test_a_recorded_trajectory_in_flight_is_scored_and_one_of_a_newer_schema_kept_whole(bus_settings: BusSettings) -> None:
    recorded = GOLDEN.read_bytes()
    newer = msgpack.packb(msgpack.unpackb(recorded) | {"schema": 2, "sample": 0})
    bus = await Bus.connect(bus_settings, run=RUN, client_name="test-upgrades")
    try:
        await bus.ensure()
        await bus.create(bus.topology.trajectory(GROUP, SAMPLE), recorded)
        await bus.create(bus.topology.trajectory(GROUP, 0), newer)
        await handle_all(bus, scorer(bus, lambda sample: float(sample.reference["answer"])))
        found = await outcomes(bus)
        letters = [message async for message in bus.read(DEAD, follow=False)]
    finally:
        await bus.close()
    [score] = [one for one in found if isinstance(one, Score)]
    [failure] = [one for one in found if isinstance(one, Failure)]
    assert (score.sample, score.reward) == (SAMPLE, 12.0)
    assert (failure.sample, failure.stage, failure.final) == (0, "malformed", True)
    assert "schema 2, this reader knows 1" in failure.reason
    assert [letter.data for letter in letters] == [newer]
