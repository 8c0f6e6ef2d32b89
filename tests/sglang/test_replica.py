"""A worker whose engine is a real SGLang server: what it serves is proved, and what it didn't take is never advertised."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from live.worker.conftest import Start, start, world
from live.worker.world import TOLERANCE, World
from support.waiting import until
from towline.contract.task import SamplingParams
from towline.contract.trajectory import Trajectory
from towline.delta.state import ModelState
from towline.engine.sglang.client import SglangClient
from towline.engine.sglang.weights import WeightFiles
from unit.engine.models import digest_of, plain_logprobs

pytestmark = pytest.mark.sglang
__all__ = ["start", "world"]
START_SECONDS = 150.0


@pytest.mark.parametrize("way", ["overlay", "loader"])
async def test_a_server_that_kept_old_weights_is_caught_before_it_advertises(
    world: World, start: Start, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    world.seed()
    running = await start(engine="sglang", slots=4, arguments={"weights": way})
    first = await world.served(0, seconds=START_SECONDS)
    assert first.engine_digest == (digest_of(world.states[0]) if way == "loader" else None)
    assert first.probe_max_abs_diff is not None
    assert first.probe_max_abs_diff < 1e-4
    replica = running.worker.replica
    with monkeypatch.context() as lying:
        if way == "overlay":
            base = str(world.folder / "copy-w")
            honest = SglangClient.load_folder

            async def keep(self: SglangClient, folder: str, *, label: str, flush: bool) -> None:
                """Answers 200 under the new version's label; the weights are those from before."""
                await honest(self, base, label=label, flush=flush)

            lying.setattr(SglangClient, "load_folder", keep)
        else:
            whole = WeightFiles.write_changed

            def all_but_one(self: WeightFiles, state: ModelState, names: Iterable[str]) -> Path | None:
                return whole(self, state, sorted(names)[1:])

            lying.setattr(WeightFiles, "write_changed", all_but_one)
        bad = world.commit(1)
        await until(lambda: bad in replica.figures.failed, 60.0)
        assert ("on the probe differ" if way == "overlay" else "live weights have the digest") in replica.figures.failed[bad]
    await until(lambda: replica.states.state == "serving", 60.0)
    ack = await world.ack("w")
    assert ack is not None
    assert (replica.version, ack.version) == (0, 0)

    good = world.commit(2)
    ack = await world.served(good, seconds=60.0)
    assert ack.probe_max_abs_diff is not None
    assert ack.probe_max_abs_diff < min(TOLERANCE, 1e-4)
    assert ack.engine_digest == (digest_of(world.states[good]) if way == "loader" else None)
    await world.task(1, sampling=SamplingParams(max_tokens=30))
    check(await world.trajectory(1), good, world.models[good])


def check(trajectory: Trajectory, version: int, model: Any) -> None:
    """Sampled by `version` alone, with that model's logprobs."""
    assert trajectory.engine == "sglang"
    assert trajectory.policy_tokens == 30
    assert {span.version for span in trajectory.version_spans} == {version}
    expected = plain_logprobs(model, trajectory.tokens.tolist())[-30:]
    np.testing.assert_allclose(trajectory.logprobs[-30:], expected, rtol=0, atol=1e-4)
