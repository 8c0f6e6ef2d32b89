"""Two processes of a service at once: one works, and whoever was overtaken finds that out when it wakes, and stops."""

from __future__ import annotations

import os
import signal

from fault.real_run import real_run

LEADING = ("buffer", "trainer")


def test_the_second_takes_over_from_one_that_hangs_which_is_fenced_when_it_wakes(tmp_path):
    store = (tmp_path / "store").as_uri()
    with real_run(tmp_path, run__steps="30", store__url=store) as run:
        run.up()
        run.until_depth(2)
        hanging = [run.pid(service) for service in LEADING]
        for pid in hanging:
            os.kill(pid, signal.SIGSTOP)
        seconds = {service: run.serve(service, "second") for service in (*LEADING, "publisher")}
        try:
            run.until_depth(run.depth() + 6)  # further than what the hanging ones had in flight: the second ones work
            reward = run.pid("reward")
            os.kill(reward, signal.SIGSTOP)  # the run mustn't end before the former ones have woken up
            for pid in hanging:
                os.kill(pid, signal.SIGCONT)
            run.until(lambda: all(f"{service} was fenced" in run.events() for service in LEADING), "nobody was fenced")
            os.kill(reward, signal.SIGCONT)
            for service in ("trainer", "publisher"):
                run.until(lambda service=service: seconds[service].poll() is not None, f"the second {service} never ended")
                assert seconds[service].returncode in (0, 75), run.said(service, "second")
            # The buffer that leads isn't one of `towline up`'s, which sees the end by the logs, and ends that one as well.
            run.assert_ended_well()
            assert seconds["buffer"].wait(60) in (0, 128 + signal.SIGTERM)
        finally:
            for process in seconds.values():
                process.kill()
                process.wait()
