"""`towline up` itself is killed: nothing of the run stays behind, and the same command goes on to the end."""

from __future__ import annotations

import signal

from fault.real_run import real_run


def test_a_killed_up_leaves_nobody_and_goes_on_later(tmp_path):
    with real_run(tmp_path, run__steps="8") as run:
        run.up()
        reached = run.until_depth(3)
        run.signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
        run.until(lambda: run.left() == [], "the guard left something")
        run.up()
        answer = run.assert_ended_well()
        assert reached <= answer["audit"]["depth"] == 8
