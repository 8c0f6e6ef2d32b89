"""Walls where there are sites: home takes in what the site's streams say, by names that a thief at home knows."""

from __future__ import annotations

import json
from pathlib import Path

import nats
import nats.errors
import pytest

from live.sites.pair import SITE, pair
from support.waiting import until
from towline.access.identity import bus_as
from towline.access.roles import BUFFER, VIEWER, WORKER
from towline.bus.client import Bus
from towline.bus.topology import OUTCOME, TRAJECTORY


@pytest.mark.slow
async def test_home_takes_in_nothing_that_a_viewers_consumer_sends_in_a_sites_name(tmp_path: Path, run_name: str) -> None:
    """The subject by which a site's stream comes is one that home has subscribed to literally: so a consumer can send there."""
    async with pair(tmp_path, run_name) as two:
        await two.prepare()
        async with two.buses(BUFFER, WORKER) as (buffer, far):
            names = buffer.topology
            await far.publish(names.failure(1, 0), b"first")
            await until(lambda: _has(buffer, [b"first"]), 60)
            near = await Bus.connect(bus_as(two.home, WORKER), run=run_name, client_name="near")
            await near.publish(names.trajectory(7, 7), b"forged")
            seed = (tmp_path / "keys" / f"{VIEWER}.nk").read_text()
            thief = await nats.connect(two.home.url, nkeys_seed_str=seed, inbox_prefix="_INBOX.viewer", error_cb=_ignore)
            stream = names.stream(TRAJECTORY)
            config = {
                "deliver_policy": "all", "ack_policy": "none",
                "deliver_subject": f"towline.sync.{names.stream(OUTCOME)}.{SITE}",
            }  # fmt: skip
            for consumer, may in (("thief", True), (f"sync-{SITE}", False)):
                body = json.dumps({"stream_name": stream, "config": {**config, "name": consumer}}).encode()
                subject = f"$JS.API.CONSUMER.CREATE.{stream}.{consumer}"
                if may:
                    assert "error" not in json.loads((await thief.request(subject, body, timeout=10)).data)
                else:
                    with pytest.raises(nats.errors.TimeoutError):
                        await thief.request(subject, body, timeout=1)
            await far.publish(names.failure(1, 1), b"second")
            await until(lambda: _has(buffer, [b"first", b"second"]), 90)
            await thief.close()
            await near.close()


async def _has(bus: Bus, wanted: list[bytes]) -> bool:
    found = [message.data async for message in bus.read(OUTCOME, follow=False)]
    assert found == wanted[: len(found)]
    return found == wanted


async def _ignore(error: Exception) -> None:
    pass
