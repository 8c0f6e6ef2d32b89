"""Samples from outside are scored as any other, under their own subjects; one that can't be is a failure there, too."""

from __future__ import annotations

import dataclasses

import pytest

from live.reward.test_scoring import handle_all, outcomes, publish, scorer
from towline.bus.topology import DEAD, OUTCOME
from towline.contract.groups import EXTERNAL, external_group
from towline.contract.outcome import Failure, Score
from towline.contract.trajectory import encode_trajectory


@pytest.mark.parametrize("scope", ["sample", "group"])
async def test_external_samples_are_scored_under_their_own_subjects(bus, make_trajectory, scope):
    group = external_group("session-1")
    for sample in (1, 0):
        trajectory = dataclasses.replace(make_trajectory(1, sample, size=2), group=group, lane=EXTERNAL, task_sequence=0)
        await publish(bus, trajectory)
    service = scorer(bus, (lambda samples: [0.5] * len(samples)) if scope == "group" else (lambda sample: 0.5), scope=scope)
    await handle_all(bus, service)
    found = sorted(await outcomes(bus), key=lambda score: score.sample)
    subjects = [message.subject async for message in bus.read(OUTCOME, follow=False)]
    assert all(isinstance(score, Score) and score.lane == EXTERNAL and score.task_sequence == 0 for score in found)
    assert [(score.group, score.sample, score.group_size) for score in found] == [(group, 0, 2), (group, 1, 2)]
    assert sorted(subjects) == [bus.topology.score(group, 0), bus.topology.score(group, 1)]
    assert subjects[0].split(".")[4] == f"ext-{-group}"


async def test_one_that_cant_be_read_is_a_final_failure_of_its_group(bus, make_trajectory):
    group = external_group("session-2")
    trajectory = dataclasses.replace(make_trajectory(1, 1, size=2), group=group, lane=EXTERNAL, task_sequence=0)
    await publish(bus, trajectory, encode_trajectory(trajectory)[:-9])
    await handle_all(bus, scorer(bus, lambda sample: 1.0))
    (failure,) = await outcomes(bus)
    assert isinstance(failure, Failure)
    assert (failure.group, failure.sample, failure.stage, failure.final) == (group, 1, "malformed", True)
    assert [message.subject async for message in bus.read(DEAD, follow=False)] == [bus.topology.dead("reward")]
