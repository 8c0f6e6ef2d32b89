"""The reward service's core on a real bus: docs/design/001-protocol.md, section 6."""

from __future__ import annotations

import asyncio
import time

import pytest

from towline.bus.topology import DEAD, OUTCOME
from towline.config import RewardSettings
from towline.contract.codec import digest
from towline.contract.outcome import Failure, Score, decode_outcome
from towline.contract.trajectory import encode_trajectory
from towline.reward.scoring import Scorer
from towline.verifiers.base import Reward, Verifier
from towline.verifiers.tokenizer import LazyTokenizer


def scorer(bus, call, *, scope="sample", is_async=False, replica="0", **settings):
    settings = RewardSettings(function="mine:reward", scope=scope, **settings)
    tokenizer = LazyTokenizer(lambda: pytest.fail("nobody asked for text"))
    return Scorer(bus, settings, Verifier("mine:reward", call, is_async), tokenizer, replica)


async def publish(bus, trajectory, data=None):
    data = encode_trajectory(trajectory) if data is None else data
    return (await bus.create(bus.topology.trajectory(trajectory.group, trajectory.sample), data)).sequence, data


async def handle_all(bus, service, *, rounds=1, seconds=0.5):
    """Deliveries until none comes for `seconds`; the consumer's unacked count afterwards."""
    consumer = await bus.consumer(bus.topology.reward_consumer())
    count = 0
    while deliveries := await consumer.fetch(256, seconds):
        count += len(deliveries)
        await asyncio.gather(*[service.handle(delivery) for delivery in deliveries])
    await consumer.close()
    return count


async def outcomes(bus):
    return [decode_outcome(message.data) async for message in bus.read(OUTCOME, follow=False)]


async def test_a_score_names_the_bytes_and_repeats_what_the_buffer_needs(bus, make_trajectory):
    trajectory = make_trajectory(7, 0, answer=6)
    sequence, data = await publish(bus, trajectory)
    service = scorer(bus, lambda sample: Reward(sample.response_tokens[0] / 10, {"digit": 6}))
    assert await handle_all(bus, service) == 1
    (score,) = await outcomes(bus)
    assert score == Score(
        run=bus.topology.run, lane="train", group=7, sample=0, group_size=1, task_sequence=70, trajectory_sequence=sequence,
        trajectory_digest=digest(data), reward=0.6, components={"digit": 6.0}, verifier="mine:reward", policy_tokens=2,
        total_tokens=4, version_spans=trajectory.version_spans, finish="stop",
    )  # fmt: skip
    assert (service.counts.scored, service.counts.failed) == (1, 0)


async def test_an_async_verifier_scores_too(bus, make_trajectory):
    await publish(bus, make_trajectory())

    async def reward(sample):
        await asyncio.sleep(0)
        return 0.25

    await handle_all(bus, scorer(bus, reward, is_async=True))
    assert [outcome.reward for outcome in await outcomes(bus)] == [0.25]


async def test_the_first_score_stands_and_a_redelivery_isnt_scored_again(bus, make_trajectory):
    trajectory = make_trajectory()
    await publish(bus, trajectory)
    consumer = await bus.consumer(bus.topology.reward_consumer())
    (delivery,) = await consumer.fetch(1, 1.0)
    await delivery.nak()
    first = scorer(bus, lambda sample: 1.0)
    (delivery,) = await consumer.fetch(1, 1.0)
    await first.handle(delivery)
    await delivery.nak()  # an ack from another delivery may be lost: the message comes again
    calls = []
    second = scorer(bus, lambda sample: calls.append(1) or 0.0)
    await second.handle(delivery)
    await consumer.close()
    assert [outcome.reward for outcome in await outcomes(bus)] == [1.0]
    assert (calls, second.counts.repeated, second.counts.scored) == ([], 1, 0)


async def test_a_malformed_trajectory_goes_to_dead_whole_and_fails_its_sample(bus, make_trajectory):
    trajectory = make_trajectory(3, 2, size=4)
    data = encode_trajectory(trajectory)[:-9]
    await publish(bus, trajectory, data)
    service = scorer(bus, lambda sample: 1.0)
    await handle_all(bus, service)
    assert await handle_all(bus, service) == 0, "it was acked"
    (failure,) = await outcomes(bus)
    assert isinstance(failure, Failure)
    assert (failure.group, failure.sample, failure.stage, failure.final) == (3, 2, "malformed", True)
    (dead,) = [message async for message in bus.read(DEAD, follow=False)]
    assert dead.data == data
    assert dead.subject == bus.topology.dead("reward")


async def test_a_trajectory_under_anothers_subject_is_malformed(bus, make_trajectory):
    other = make_trajectory(5, 1)
    await publish(bus, make_trajectory(4, 0), encode_trajectory(other))
    await handle_all(bus, scorer(bus, lambda sample: 1.0))
    (failure,) = await outcomes(bus)
    assert (failure.group, failure.sample, failure.stage, failure.lane) == (4, 0, "malformed", "train")


async def test_a_failing_verifier_is_tried_again_and_then_gives_the_group_up(bus, make_trajectory, monkeypatch):
    monkeypatch.setattr("towline.reward.scoring.RETRY_SECONDS", (0.05,))
    trajectory = make_trajectory(9, 0)
    _, data = await publish(bus, trajectory)
    calls = []

    def reward(sample):
        calls.append(1)
        raise ZeroDivisionError("by design")

    service = scorer(bus, reward, max_attempts=3)
    await handle_all(bus, service)
    assert len(calls) == 3
    (failure,) = await outcomes(bus)
    assert (failure.stage, failure.final, failure.task_sequence) == ("verify", True, 90)
    assert "ZeroDivisionError" in failure.reason
    (dead,) = [message async for message in bus.read(DEAD, follow=False)]
    assert dead.data == data
    assert (service.counts.retried, service.counts.failed) == (2, 1)


async def test_a_verifier_that_recovers_is_no_failure(bus, make_trajectory, monkeypatch):
    monkeypatch.setattr("towline.reward.scoring.RETRY_SECONDS", (0.05,))
    await publish(bus, make_trajectory())
    answers = iter([float("nan"), 0.75])
    await handle_all(bus, scorer(bus, lambda sample: next(answers)))
    assert [outcome.reward for outcome in await outcomes(bus)] == [0.75]


async def test_one_that_hangs_holds_up_nobody_else(bus, make_trajectory):
    for group in range(20):
        await publish(bus, make_trajectory(group, hang=group == 0))
    release = asyncio.get_running_loop().time() + 1.0

    def reward(sample):
        while sample.reference["hang"] and time.monotonic() < release:
            time.sleep(0.01)
        return 1.0

    service = scorer(bus, reward, timeout_seconds=0.2, concurrency=2, max_attempts=1)
    started = time.monotonic()
    await handle_all(bus, service, seconds=0.2)
    assert time.monotonic() - started < 1.0
    found = await outcomes(bus)
    assert sorted(score.group for score in found if isinstance(score, Score)) == list(range(1, 20))
    (failure,) = [outcome for outcome in found if isinstance(outcome, Failure)]
    assert (failure.group, failure.stage) == (0, "verify")


async def test_a_group_is_scored_once_it_is_whole_and_all_at_once(bus, make_trajectory):
    calls = []

    def ranks(samples):
        calls.append([sample.sample for sample in samples])
        order = sorted(samples, key=lambda sample: sample.response_tokens[0])
        return [float(order.index(sample)) for sample in samples]

    service = scorer(bus, ranks, scope="group")
    for sample, answer in ((2, 7), (0, 9)):
        await publish(bus, make_trajectory(1, sample, size=3, answer=answer))
    await handle_all(bus, service)
    assert await outcomes(bus) == []
    await publish(bus, make_trajectory(1, 1, size=3, answer=5))
    await handle_all(bus, service)
    found = await outcomes(bus)
    assert [(score.sample, score.reward, score.trajectory_sequence) for score in found] == [(0, 2.0, 2), (1, 0.0, 3), (2, 1.0, 1)]
    assert calls == [[0, 1, 2]]


async def test_two_replicas_score_a_group_once(bus, make_trajectory):
    calls = []
    services = [
        scorer(bus, lambda samples: calls.append(1) or [0.5] * len(samples), scope="group", replica=str(i)) for i in range(2)
    ]
    groups, size = 20, 4
    for group in range(groups):
        for sample in range(size):
            await publish(bus, make_trajectory(group, sample, size=size))
    await asyncio.gather(*[handle_all(bus, service) for service in services])
    found = await outcomes(bus)
    assert sorted((score.group, score.sample) for score in found) == [(g, s) for g in range(groups) for s in range(size)]
    assert sum(service.counts.scored for service in services) == groups * size


async def test_a_restarted_replica_finishes_a_group_that_another_began(bus, make_trajectory):
    for sample in range(2):
        await publish(bus, make_trajectory(1, sample, size=3))
    await handle_all(bus, scorer(bus, lambda samples: [1.0] * len(samples), scope="group"))
    await publish(bus, make_trajectory(1, 2, size=3))
    await handle_all(bus, scorer(bus, lambda samples: [1.0] * len(samples), scope="group"))
    assert sorted(score.sample for score in await outcomes(bus)) == [0, 1, 2]


async def test_a_group_with_a_wrong_number_of_rewards_gives_up_as_one(bus, make_trajectory, monkeypatch):
    monkeypatch.setattr("towline.reward.scoring.RETRY_SECONDS", (0.05,))
    for sample in range(2):
        await publish(bus, make_trajectory(1, sample, size=2))
    await handle_all(bus, scorer(bus, lambda samples: [1.0], scope="group", max_attempts=2))
    found = await outcomes(bus)
    assert {outcome.stage for outcome in found} == {"verify"}
