"""A process dies between any two steps that a crash must not confuse, as if by kill -9; the run ends as if it hadn't."""

from __future__ import annotations

import pytest

from fault.field import FAULTY, FAULTY_GROUPS, field
from towline.faults import POINTS

WORST = (
    "buffer.writer_appended", "buffer.task_appended", "buffer.reissue_appended", "buffer.batch_appended", "buffer.drop_appended",
    "buffer.before_snapshot", "buffer.end_appended", "worker.before_publish", "worker.trajectory_published",
    "worker.failure_published", "replica.activated", "reward.published", "reward.failure_published", "trainer.opened",
    "trainer.checkpointed", "trainer.staged", "publisher.committed", "publisher.anchor_uploaded",
)  # fmt: skip
SETTINGS = {"run__steps": 10, "publisher__anchor_every": 3, "buffer__snapshot_every_records": 60}
ONLY_SINGLE = ("buffer.before_cancel", "buffer.cancel_appended")
"""When a whole group is scored at once, none of its samples is at work any more."""

ON_REQUEST = tuple(f"buffer.{name}" for name in ("before_requeue", "requeue_appended", "before_admit", "admit_appended"))
"""They need somebody from outside (test_requests.py)."""


@pytest.mark.parametrize("task", [FAULTY, pytest.param(FAULTY_GROUPS, marks=pytest.mark.slow)], ids=["samples", "groups"])
def test_a_run_survives_deaths_at_the_worst_moments(zygote, tmp_path, task):
    with field(zygote, tmp_path, die_at=WORST, **SETTINGS, **task) as run:
        run.assert_ended_well()
        assert run.died_at() == set(WORST)
        assert run.kills.total() == len(WORST)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("part", dict.fromkeys(part for point in POINTS if (part := point.partition(".")[0]) != "gateway"))
def test_a_run_survives_a_death_at_every_point_of(zygote, tmp_path, part, max_staleness):
    task = FAULTY if max_staleness == 0 else FAULTY_GROUPS
    points = {point for point in POINTS if point.startswith(f"{part}.")} - set(ON_REQUEST)
    if task is FAULTY_GROUPS:
        points -= set(ONLY_SINGLE)
    with field(zygote, tmp_path, die_at=sorted(points), buffer__max_staleness=max_staleness, **SETTINGS, **task) as run:
        run.assert_ended_well()
        assert run.died_at() == points
        assert run.kills.total() == len(points)
