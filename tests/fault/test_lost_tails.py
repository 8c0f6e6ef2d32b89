"""A stream comes back without its newest messages, as from an older copy of the server's disk; everything else goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fault.field import FAULTY, Field, field
from towline.audit.report import AuditReport
from towline.audit.run import audit
from towline.bus.topology import CONTROL, OUTCOME, TRAJECTORY, StreamSpec
from towline.store.log import Log

LOST_EVIDENCE = 6
"""The invariant by which an audit says that a row's trajectory or score can't be found any more."""


def folder_of(run: Field, spec: StreamSpec) -> Path:
    (found,) = run.directory.path.glob(f"nats/data/jetstream/*/streams/towline_field_{spec.key}")
    return found


def lose_tail(run: Field, spec: StreamSpec, folder: Path, steps: int = 2) -> None:
    """What the stream got during that many steps."""
    with run.without("nats-server"):
        shutil.copytree(folder_of(run, spec), folder)
    run.until_depth(run.depth() + steps)
    with run.without("nats-server"):
        place = folder_of(run, spec)
        shutil.rmtree(place)
        shutil.copytree(folder, place)


@pytest.mark.slow  # a smaller one of the kind: tests/live/buffer/test_regression.py
@pytest.mark.parametrize("spec", [TRAJECTORY, OUTCOME], ids=lambda spec: spec.key)
def test_what_a_lost_tail_held_is_had_again(zygote, tmp_path, spec):
    with field(zygote, tmp_path, run__steps=16, buffer__max_staleness=2, **FAULTY) as run:
        run.until_depth(3)
        lose_tail(run, spec, tmp_path / "older")
        run.until(run.is_done, "the run never ended")

        async def look(bus) -> AuditReport:
            return await audit(bus, Log(run.objects, "field"), run.settings)

        report = run.ask(look)
    assert report.finished
    assert report.counts.open == 0
    assert report.counts.balanced
    assert report.depth == 16
    assert [str(found) for found in report.violations if found.invariant != LOST_EVIDENCE] == []
    assert report.staleness_max <= 2


def test_a_control_that_lost_its_tail_stops_the_run_by_name(zygote, tmp_path):
    with field(zygote, tmp_path, run__steps=1000, **FAULTY) as run:
        run.until_depth(3)
        lose_tail(run, CONTROL, tmp_path / "older")
        log = run.directory.log_path("buffer")
        run.until(lambda: "\nstream_regressed: " in log.read_text(), "the buffer went on")
        run.until(lambda: run.exits["buffer:1"] >= 2, "the buffer went on after a restart")
        depth = run.depth()
        run.until(lambda: run.exits["buffer:1"] >= 4, "the buffer went on after a restart")
        assert run.depth() - depth <= 1, "the run went on without a buffer"
