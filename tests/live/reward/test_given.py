"""A reward that a sample's own client said counts where the run lets it; everywhere else the verifier's does."""

from __future__ import annotations

import dataclasses

import pytest

from live.reward.test_scoring import handle_all, outcomes, publish, scorer
from towline.contract.outcome import Failure, Score
from towline.contract.task import SESSION
from towline.contract.trajectory import GivenReward, decode_trajectory, encode_trajectory

GIVEN = GivenReward(value=0.75, components={"tests": 3.0}, by="me")


def said(make_trajectory, sample, *, given=GIVEN):
    return dataclasses.replace(make_trajectory(1, sample, size=2), lane=SESSION, given_reward=given)


@pytest.mark.parametrize("scope", ["sample", "group"])
@pytest.mark.parametrize("lets", [True, False])
async def test_a_client_s_reward_counts_where_the_run_lets_it(bus, make_trajectory, scope, lets):
    judged = []

    def judge(given):
        judged.append(given)
        return [0.25] * len(given) if scope == "group" else 0.25

    await publish(bus, said(make_trajectory, 0))
    await publish(bus, said(make_trajectory, 1, given=None))
    service = scorer(bus, judge, scope=scope)
    service._take_given = lets
    await handle_all(bus, service)
    found = sorted(await outcomes(bus), key=lambda score: score.sample)
    assert all(isinstance(score, Score) and score.lane == SESSION for score in found)
    first, second = found
    own = (0.25, {}, "mine:reward")
    assert (first.reward, first.components, first.verifier) == ((0.75, {"tests": 3.0}, "client") if lets else own)
    assert (second.reward, second.components, second.verifier) == own
    assert len(judged) == (1 if lets or scope == "group" else 2), "nobody judges what was said"


async def test_a_reward_that_isn_t_a_number_is_a_failed_verification_s_end(bus, make_trajectory):
    await publish(bus, said(make_trajectory, 0, given=GivenReward(value=float("nan"), by="me")))
    service = scorer(bus, lambda sample: 1.0, max_attempts=1)
    service._take_given = True
    await handle_all(bus, service)
    (failure,) = await outcomes(bus)
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.final) == ("verify", True)


def test_it_travels_with_its_trajectory_and_costs_nothing_where_there_is_none(make_trajectory):
    with_it, without = said(make_trajectory, 0), said(make_trajectory, 0, given=None)
    assert decode_trajectory(encode_trajectory(with_it)).given_reward == GIVEN
    assert decode_trajectory(encode_trajectory(without)).given_reward is None
    assert b"given_reward" not in encode_trajectory(without)
