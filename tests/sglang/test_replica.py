"""A worker whose engine is a real SGLang server: what it serves is proved, and what it didn't take is never advertised."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from live.worker.conftest import Start, start, world
from live.worker.world import CONTEXT, TOLERANCE, World
from support.waiting import until
from towline.bus.topology import PARTIAL
from towline.contract.partial import decode_partial
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


async def test_what_an_sglang_worker_hands_over_another_engine_finishes(world: World, start: Start) -> None:
    world.seed()
    first = await start("a", engine="sglang", slots=4, partial_every_tokens=50, max_context_tokens=CONTEXT)
    await world.served(0, "a", seconds=START_SECONDS)
    await world.task(1, sampling=SamplingParams(max_tokens=1500))

    async def stands(version: int) -> bool:
        """A PARTIAL of tokens that the version sampled."""
        message = await world.bus.last(PARTIAL, world.bus.topology.partial(1, 0))
        spans = () if message is None else decode_partial(message.data).version_spans
        return bool(spans) and spans[-1].version == version

    await until(lambda: stands(0), 60.0)
    newer = world.commit(1)
    # Written while the stream that the activation cut was still underway.
    await until(lambda: stands(newer), 60.0)
    first.worker.drain()
    assert await asyncio.wait_for(first.ended, 60.0) == "drained"
    message = await world.bus.last(PARTIAL, world.bus.topology.partial(1, 0))
    assert message is not None
    partial = decode_partial(message.data)
    assert partial.policy_tokens < 1500, "it had ended before it was handed over"

    await start("b", max_context_tokens=CONTEXT)
    trajectory = await world.trajectory(1, seconds=60.0)
    assert (trajectory.engine, trajectory.policy_tokens, trajectory.finish) == ("torch", 1500, "length")
    assert trajectory.tokens[: len(partial.tokens)].tolist() == partial.tokens.tolist()
    spans = trajectory.version_spans
    assert [span.version for span in spans] == [0, newer]
    assert [spans[0].start, spans[0].end, spans[1].end] == [3, spans[1].start, 1503]
    for span in spans:
        expected = plain_logprobs(world.models[span.version], trajectory.tokens.tolist())[span.start - 1 : span.end - 1]
        np.testing.assert_allclose(trajectory.logprobs[span.start : span.end], expected, rtol=0, atol=1e-4)


def check(trajectory: Trajectory, version: int, model: Any) -> None:
    """Sampled by `version` alone, with that model's logprobs."""
    assert trajectory.engine == "sglang"
    assert trajectory.policy_tokens == 30
    assert {span.version for span in trajectory.version_spans} == {version}
    expected = plain_logprobs(model, trajectory.tokens.tolist())[-30:]
    np.testing.assert_allclose(trajectory.logprobs[-30:], expected, rtol=0, atol=1e-4)
