"""A run of two sites whose line is cut for a while: the far side goes on, nothing is lost, all ends well; and what a cut costs
that outlasts the buffer's patience."""

from __future__ import annotations

from pathlib import Path

import pytest

from live.sites.pair import SITE, pair
from live.sites.whole import FAR, NEAR, SAMPLES, converged, delivered, look, mirrored, settings_of, start, under_way
from support.waiting import until
from towline.bus.client import Bus
from towline.bus.topology import REPLICAS
from towline.config import StoreSettings
from towline.store.objects import open_store

STEPS = 8


@pytest.mark.parametrize("silent_seconds", [600.0, pytest.param(0.5, marks=pytest.mark.slow)])
async def test_a_run_over_two_sites_goes_on_through_a_cut_and_is_whole_afterwards(
    tmp_path: Path, run_name: str, silent_seconds: float
) -> None:
    home_store, far_store = (StoreSettings(url=(tmp_path / name).as_uri()) for name in ("home-store", "far-store"))
    async with pair(tmp_path, run_name, roles=False) as two:
        await two.prepare()
        settings = settings_of(run_name, two.home, home_store, tmp_path, steps=STEPS, site_silent_seconds=silent_seconds)
        far_settings = settings.model_copy(update={"bus": two.site, "store": far_store})
        async with two.buses() as (home, site), under_way(settings, home, tmp_path) as run:
            copy = open_store(far_store)
            async with mirrored(run.objects, copy, run_name, lambda: not two.line.refuse):
                await start(run, NEAR, settings)
                await start(run, FAR, far_settings)
                await run.until_depth(1)
                await until(lambda: _half_a_group(site))
                two.cut()
                before, depth = await delivered(site), run.trainer.depth
                await until(lambda: _more(site, before))
                if silent_seconds < 1:
                    # The registry's entries last for 15 s: the far side's is taken away, as its expiry would.
                    await home.kv(REPLICAS).delete(FAR)
                    await run.until_depth(depth + 4)
                two.heal()
                await run.until_depth(STEPS)
                assert set((await run.ended()).values()) == {0}
                await converged(run, settings, copy)
            seen = await look(home, site)
        assert set(seen.admitted) == {"", SITE}
        assert seen.trained.total() == STEPS * SAMPLES
        if silent_seconds > 1:
            assert set(seen.trained) == {NEAR, FAR}
            assert (seen.moved, seen.twice) == (0, {})
        else:
            assert seen.moved > 0
            assert all(sorted(by) == [FAR, NEAR] for by in seen.twice.values()), seen.twice


async def _half_a_group(site: Bus) -> bool:
    """The other sample of a group of two is being generated."""
    return await delivered(site) % 2 == 1


async def _more(site: Bus, before: int) -> bool:
    return await delivered(site) > before
