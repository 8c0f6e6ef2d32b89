"""A worker asks for what its engine runs: fewer where samples wait in the engine's queue, more again where they don't."""

from __future__ import annotations

import pytest

from towline.rollout_worker.pace import Pace


class Engine:
    """Runs `room` samples at a time for `seconds` each; what is more waits its turn. Waves of `pace.limit` arrive together."""

    def __init__(self, room: int, seconds: float) -> None:
        self.room, self.seconds, self.now = room, seconds, 0.0

    def wave(self, pace: Pace) -> None:
        begun_at, count = self.now, pace.limit
        for place in range(count):
            turn = place // self.room
            pace.finished(
                begun_at=begun_at, queue_seconds=turn * self.seconds, generate_seconds=self.seconds, tokens=10, busy=count - place
            )
        self.now += self.seconds * -(-count // self.room)


@pytest.mark.parametrize("room", [3, 11, 24, 64])
def test_the_limit_comes_to_what_the_engine_runs_at_a_time_and_stays_around_it(room: int) -> None:
    engine = Engine(room, seconds=8.0)
    pace = Pace(64, 1.0, clock=lambda: engine.now)
    for _ in range(60):
        engine.wave(pace)
    limits = []
    for _ in range(40):
        engine.wave(pace)
        limits.append(pace.limit)
    assert room * 0.6 <= min(limits) <= max(limits) <= min(64, room + 8 + room // 4)


def test_it_asks_for_more_again_when_the_engine_has_room() -> None:
    engine = Engine(8, seconds=8.0)
    pace = Pace(64, 1.0, clock=lambda: engine.now)
    for _ in range(40):
        engine.wave(pace)
    assert pace.limit < 20
    engine.room = 64
    for _ in range(40):
        engine.wave(pace)
    assert pace.limit == 64


def test_a_wait_that_is_short_or_nothing_beside_the_sample_s_time_changes_nothing() -> None:
    for queue, generate in ((0.9, 0.5), (30.0, 400.0)):
        pace = Pace(16, 1.0, clock=lambda: 0.0)
        for _ in range(64):
            pace.finished(begun_at=1.0, queue_seconds=queue, generate_seconds=generate, tokens=1, busy=16)
        assert pace.limit == 16


def test_one_cause_lowers_it_once() -> None:
    """Those that were waiting already when it was lowered say nothing about the new limit."""
    pace = Pace(64, 1.0, clock=lambda: 100.0)
    for _ in range(200):
        pace.finished(begun_at=50.0 if pace.limit < 64 else 150.0, queue_seconds=9.0, generate_seconds=1.0, tokens=1, busy=64)
    assert pace.limit == 48


def test_it_never_comes_to_nothing() -> None:
    pace = Pace(4, 0.1, clock=lambda: 0.0)
    for _ in range(200):
        pace.finished(begun_at=1.0, queue_seconds=100.0, generate_seconds=0.1, tokens=1, busy=4)
    assert pace.limit == 1
