"""The seeded killer, a small one; `make soak` has the large one."""

from __future__ import annotations

from fault.soak import soak

KILLS, PURGED_KILLS = 30, 15


def test_a_run_survives_kills_at_random_moments(zygote, tmp_path):
    result = soak(zygote, tmp_path, KILLS, seed=4, max_staleness=1)
    assert sum(result["killed"].values()) >= KILLS
    assert result["audit"]["clean"]


def test_a_run_whose_history_is_purged_survives_them(zygote, tmp_path):
    result = soak(zygote, tmp_path, PURGED_KILLS, seed=5, max_staleness=1, keep_history=False)
    assert sum(result["killed"].values()) >= PURGED_KILLS
    assert result["audit"]["clean"]
