"""A process dies between any two steps that a crash must not confuse, as if by kill -9; the run ends as if it hadn't."""

from __future__ import annotations

import pytest

from fault.real_run import RealRun, real_run
from towline.faults import POINTS, VARIABLE

FEW = ("trainer.opened", "trainer.checkpointed", "trainer.staged", "publisher.committed", "publisher.anchor_uploaded")
SETTINGS = {"run__steps": "10", "eval__every": "10", "publisher__anchor_every": "3"}


def die_at(run: RealRun, marks, points) -> None:
    """One run in which a process dies at each of the points, once."""
    marks.mkdir()
    run.up(environment={VARIABLE: ",".join(f"{point}@{marks / point}" for point in points)})
    answer = run.assert_ended_well()
    assert answer["summary"]["steps"] == int(SETTINGS["run__steps"])
    assert {mark.name for mark in marks.iterdir()} == set(points), "a point was never reached"


def test_a_run_survives_deaths_at_the_worst_moments(tmp_path):
    with real_run(tmp_path, store__url=(tmp_path / "store").as_uri(), **SETTINGS) as run:
        die_at(run, tmp_path / "marks", FEW)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", ["0", "2"])
@pytest.mark.parametrize("point", POINTS)
def test_a_run_survives_a_death_at(tmp_path, point, max_staleness):
    store = (tmp_path / "store").as_uri()
    with real_run(tmp_path, store__url=store, buffer__max_staleness=max_staleness, **SETTINGS) as run:
        die_at(run, tmp_path / "marks", [point])
