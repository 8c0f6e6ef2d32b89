"""Every process of a run is killed in turn; the run ends as if nothing had happened."""

from __future__ import annotations

import pytest

from fault.real_run import SERVERS, SERVICES, kill_in_turn, real_run


def test_a_run_survives_each_kill(tmp_path):
    # The worker first: what it had in hand is redelivered only after its ack_wait, while the others are killed.
    order = sorted(SERVICES, key=lambda service: service != "rollout_worker")
    with real_run(tmp_path, run__steps="30") as run:
        run.up()
        run.until_depth(2)
        kill_in_turn(run, [*order, *SERVERS])
        run.assert_ended_well()


def test_a_synchronous_run_survives_each_kill(tmp_path):
    store = (tmp_path / "store").as_uri()
    with real_run(tmp_path, run__steps="10", buffer__max_staleness="0", store__url=store) as run:
        run.up()
        run.until_depth(1)
        kill_in_turn(run, ["buffer", "trainer", "publisher", "nats-server"])
        run.assert_ended_well(max_staleness=0)


@pytest.mark.slow
def test_a_synchronous_run_waits_for_a_killed_worker_s_and_reward_s_samples(tmp_path):
    with real_run(tmp_path, run__steps="12", buffer__max_staleness="0") as run:
        run.up()
        run.until_depth(1)
        kill_in_turn(run, ["rollout_worker", "reward", "s3-server", "rollout_worker"])
        run.assert_ended_well(max_staleness=0)
