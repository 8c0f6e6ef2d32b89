"""The seeded killer, a small one; `make soak` has the large one."""

from __future__ import annotations

from fault.soak import soak

KILLS = 30


def test_a_run_survives_kills_at_random_moments(zygote, tmp_path):
    result = soak(zygote, tmp_path, KILLS, seed=4, max_staleness=1)
    assert sum(result["killed"].values()) >= KILLS
    assert result["audit"]["clean"]
