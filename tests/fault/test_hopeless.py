"""What can't go well ends by name, with a failure, instead of never."""

from __future__ import annotations

from pathlib import Path

from fault.real_run import real_run

TESTS = str(Path(__file__).parents[1])


def test_a_reward_that_always_raises_ends_the_run(tmp_path):
    settings = {
        "reward__function": "fault.faulty:hopeless",
        "reward__max_attempts": "1",
        "reward__max_failed_groups": "12",
        "eval__every": "0",
        "store__url": (tmp_path / "store").as_uri(),
    }
    with real_run(tmp_path, run__steps="4", **settings) as run:
        run.up(environment={"PYTHONPATH": TESTS})
        assert run.wait() == 1
        last = run.events().strip().splitlines()[-1]
        assert last.startswith("verify_failed_all: reward.function failed on 12 groups in a row"), run.account()
        answer = run.answer()
        assert answer["audit"]["clean"]
        assert answer["audit"]["end_reason"] == "verify_failed_all"
        assert answer["summary"]["samples"]["open"] == 0
        assert run.left() == []
