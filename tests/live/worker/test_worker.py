"""A worker on a real bus: what it publishes is what the engine sampled, once a sample, whatever is repeated or interrupted."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np

from live.worker.conftest import Start
from live.worker.world import World
from support.garbage import left_for_the_collector
from support.waiting import until
from towline.bus.topology import DEAD
from towline.contract.task import SamplingParams
from towline.contract.trajectory import Segment
from unit.engine.models import plain_logprobs

LONG = SamplingParams(max_tokens=1500)
"""Seconds of generation."""


async def test_trajectories_hold_exactly_what_the_served_version_sampled(world: World, start: Start) -> None:
    world.seed()
    sequences = {(group, sample): await world.task(group, sample) for group in range(6) for sample in range(4)}
    await start()
    await until(lambda: _count(world, 24))
    for key, trajectory in (await world.trajectories()).items():
        tokens, prompt = trajectory.tokens.tolist(), 3 + key[1] % 5
        want = plain_logprobs(world.models[0], tokens)[prompt - 1 :]
        np.testing.assert_allclose(trajectory.logprobs[prompt:], want, rtol=0, atol=1e-5)
        assert np.isnan(trajectory.logprobs[:prompt]).all()
        assert trajectory.loss_mask.tolist() == [0] * prompt + [1] * (len(tokens) - prompt)
        assert trajectory.segments == (Segment(0, prompt, "prompt"), Segment(prompt, len(tokens), "policy"))
        assert [(s.start, s.end, s.version, s.cut) for s in trajectory.version_spans] == [(prompt, len(tokens), 0, "start")]
        assert trajectory.task_sequence == sequences[key]
        assert (trajectory.engine, trajectory.replica, trajectory.reference) == ("torch", "w", {"answer": "42"})
        assert trajectory.finish == ("stop" if tokens[-1] == 11 else "length")
    await until(lambda: _all_acked(world))


async def test_a_finished_sample_leaves_nothing_for_the_collector(world: World, start: Start) -> None:
    world.seed()
    await start()
    await world.task(0)
    await until(lambda: _count(world, 1))
    with left_for_the_collector() as left:
        for group in range(1, 21):
            await world.task(group)
        await until(lambda: _count(world, 21))
        await until(lambda: _all_acked(world))
    assert Counter(left)["Attempt"] == Counter(left)["Episode"] == 0, Counter(left)


async def test_a_sample_that_runs_across_an_activation_says_which_tokens_are_whose(world: World, start: Start) -> None:
    world.seed()
    running = await start()
    await world.served(0)
    commit = world.stage(1)
    await world.task(1, sampling=LONG)
    await until(lambda: running.worker.busy == 1)
    newer = commit()
    trajectory = await world.trajectory(1)
    assert [span.version for span in trajectory.version_spans] == [0, newer]
    assert trajectory.version_spans[1].cut == "retract"
    for span in trajectory.version_spans:
        want = plain_logprobs(world.models[span.version], trajectory.tokens.tolist())[span.start - 1 : span.end - 1]
        np.testing.assert_allclose(trajectory.logprobs[span.start : span.end], want, rtol=0, atol=1e-5)


async def test_a_task_is_held_until_its_depth_is_served(world: World, start: Start) -> None:
    world.seed()
    await start()
    await world.served(0)
    await world.task(1, not_before_depth=1)
    await world.task(2)
    await world.trajectory(2)
    assert await world.unacked() == (1, 0), "held, not given back"
    version = world.commit(1)
    assert (await world.trajectory(1)).version_start == version


async def test_a_task_whose_depth_does_not_come_is_given_up_as_not_ready(world: World, start: Start) -> None:
    world.seed()
    await start(hold_seconds=0.3)
    sequence = await world.task(1, 2, not_before_depth=1)
    failure = await world.failure()
    assert (failure.stage, failure.group, failure.sample, failure.final) == ("not_ready", 1, 2, False)
    assert (failure.task_sequence, failure.delivery) == (sequence, 1)
    await until(lambda: _all_acked(world))


async def test_a_redelivered_task_whose_trajectory_stands_is_acked_and_nothing_is_generated(world: World, start: Start) -> None:
    world.seed()
    first = await start("a")
    await world.task(1)
    before = await world.trajectory(1)
    await until(lambda: _all_acked(world))
    await first.kill()
    # As a worker that died between the trajectory and its ack would leave it.
    consumer = await world.bus.consumer(world.bus.topology.lane_consumer("train", 4))
    await world.task(1, seed=7)
    [delivery] = await consumer.fetch(1, 5.0)
    await delivery.nak()
    second = await start("b")
    await until(lambda: _all_acked(world))
    assert second.worker.figures.trajectories == second.worker.figures.superseded == 0
    assert (await world.trajectory(1)).tokens.tolist() == before.tokens.tolist()


async def test_two_workers_share_the_lane_and_no_sample_counts_twice(world: World, start: Start) -> None:
    world.seed()
    first, second = await start("a", slots=4), await start("b", slots=4)
    await world.served(0, "a")
    await world.served(0, "b")
    for group in range(16):
        for sample in range(4):
            await world.task(group, sample)
    await until(lambda: _count(world, 64))
    assert {trajectory.replica for trajectory in (await world.trajectories()).values()} == {"a", "b"}
    await until(lambda: _all_acked(world))
    figures = (first.worker.figures, second.worker.figures)
    assert sum(one.trajectories for one in figures) == 64
    assert sum(one.superseded for one in figures) == 0


async def test_a_sample_that_another_attempt_delivered_is_superseded_and_acked(world: World, start: Start) -> None:
    world.seed()
    running = await start()
    await world.served(0)
    await world.task(1)
    first = await world.trajectory(1)
    await world.task(1, seed=999)
    await until(lambda: running.worker.figures.superseded == 1)
    await until(lambda: _all_acked(world))
    assert (await world.trajectory(1)).task_sequence == first.task_sequence


async def test_a_cancelled_task_stops_at_once_and_leaves_no_record(world: World, start: Start) -> None:
    world.seed()
    running = await start()
    sequence = await world.task(1, sampling=LONG)
    await until(lambda: running.worker.busy == 1)
    await world.cancel(1, 0, sequence)
    await until(lambda: running.worker.figures.cancelled == 1 and running.worker.busy == 0)
    await until(lambda: _all_acked(world))
    late = await world.task(2, sampling=LONG, not_before_depth=5)
    await until(lambda: running.worker.busy == 1)
    await world.cancel(2, 0, late)
    await until(lambda: running.worker.figures.cancelled == 2 and running.worker.busy == 0)
    assert (await world.trajectories(), await world.failures()) == ({}, [])


async def test_a_task_cancelled_before_it_is_pulled_is_not_begun(world: World, start: Start) -> None:
    world.seed()
    await world.cancel(1, 0, await world.task(1))
    await world.task(2)
    running = await start()
    await world.trajectory(2)
    assert running.worker.figures.cancelled == 1
    assert list(await world.trajectories()) == [(2, 0)]


async def test_a_sample_that_can_not_be_fresh_any_more_is_given_up_by_the_log_s_word(world: World, start: Start) -> None:
    world.seed()
    running = await start(buffer={"max_staleness": 0})
    await world.served(0)
    commit = world.stage(1)
    sequence = await world.task(1, sampling=LONG)
    await until(lambda: running.worker.busy == 1)
    await asyncio.to_thread(commit)
    failure = await world.failure()
    assert (failure.stage, failure.task_sequence) == ("stale", sequence)
    await until(lambda: _all_acked(world))
    assert await world.trajectories() == {}


async def test_a_request_that_no_repeat_would_help_fails_for_good(world: World, start: Start) -> None:
    world.seed()
    await start()
    await world.task(1, sampling=SamplingParams(max_tokens=100_000))
    failure = await world.failure()
    assert (failure.stage, failure.final) == ("generate", True)
    assert "rollout.max_context_tokens" in failure.reason
    await world.task(2)
    await world.trajectory(2)


async def test_what_is_no_task_goes_to_the_dead_letters_whole(world: World, start: Start) -> None:
    world.seed()
    await world.bus.publish(world.bus.topology.task("train"), b"\x00rubbish")
    await world.task(1)
    await start()
    await world.trajectory(1)
    dead = await world.bus.last(DEAD, world.bus.topology.dead("rollout"))
    assert dead is not None
    assert dead.data == b"\x00rubbish"
    await until(lambda: _all_acked(world))


async def test_an_environment_of_several_turns_marks_its_own_tokens(world: World, start: Start) -> None:
    world.seed()
    await start()
    limit = SamplingParams(max_tokens=12, stop_token_ids=tuple(range(0, 61, 4)))
    for group in range(8):
        await world.task(group, environment="live.worker.environments:Echo", sampling=limit)
    await until(lambda: _count(world, 8))
    turns = set()
    for trajectory in (await world.trajectories()).values():
        kinds = [segment.kind for segment in trajectory.segments]
        turns.add(len(kinds))
        assert kinds == (["prompt"] + ["policy", "tool"] * 4)[: len(kinds)]
        assert trajectory.policy_tokens <= 12
        want = plain_logprobs(world.models[0], trajectory.tokens.tolist())
        chosen = np.flatnonzero(trajectory.loss_mask)
        np.testing.assert_allclose(trajectory.logprobs[chosen], np.array(want)[chosen - 1], rtol=0, atol=1e-5)
        for segment in trajectory.segments:
            if segment.kind == "tool":
                assert trajectory.tokens[segment.start : segment.end].tolist() == [7, 7, 7]
        assert trajectory.finish in {"tool_limit", "length"}
    assert len(turns) > 1


async def test_an_environment_that_raises_is_a_failed_attempt(world: World, start: Start) -> None:
    world.seed()
    await start()
    await world.task(1, environment="live.worker.environments:Broken")
    failure = await world.failure()
    assert (failure.stage, failure.final) == ("environment", False)
    assert "no such tool" in failure.reason


async def test_a_drained_worker_finishes_what_it_can_and_hands_the_rest_over(world: World, start: Start) -> None:
    world.seed()
    first = await start("a")
    await world.task(1, not_before_depth=7)
    await world.task(2)
    await world.trajectory(2)
    await until(lambda: first.worker.busy == 1)
    first.worker.drain()
    assert await asyncio.wait_for(first.ended, 4.0) == "drained"
    assert first.worker.figures.handed_over == 1
    assert await world.failures() == []
    assert await world.info("a") is None
    second = await start("b")
    await until(lambda: second.worker.busy == 1, 5.0)


async def test_the_run_s_end_ends_the_worker_unless_it_went_on(world: World, start: Start) -> None:
    world.seed()
    await world.end()
    await world.task(1)
    running = await start()
    await world.trajectory(1)
    await world.task(2, sampling=LONG)
    await until(lambda: running.worker.busy == 1)
    await world.end()
    assert await asyncio.wait_for(running.ended, 60.0) == "ended"


async def test_a_worker_asks_for_no_more_than_its_engine_runs_and_what_it_leaves_another_takes(
    world: World, start: Start
) -> None:
    world.seed()
    arguments = {"mean_tokens": 20.0, "sigma": 0.01, "tokens_per_second": 200.0, "room": 2}
    full = await start("full", engine="synthetic", slots=16, queue_seconds=0.05, arguments=arguments)
    await world.served(0, "full")
    for group in range(100):
        await world.task(group, sampling=SamplingParams(max_tokens=40))
    await until(lambda: full.worker.report()["limit"] <= 6)
    await start("free", engine="synthetic", slots=16, arguments=arguments | {"room": 0})
    await until(lambda: _count(world, 100))
    report = full.worker.report()
    assert report["limit"] < report["slots"] == 16
    assert report["queue_seconds_mean"] > 0
    assert report["tokens_per_second"] > 0
    by = [trajectory.replica for trajectory in (await world.trajectories()).values()]
    assert by.count("free") > by.count("full") / 4


async def _count(world: World, wanted: int) -> bool:
    return len(await world.trajectories()) == wanted


async def _all_acked(world: World) -> bool:
    return await world.unacked() == (0, 0)
