"""The bus is killed in the middle of a stream and comes back: the stream goes on, and no token is another one for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from live.gateway.conftest import Scene, events, spell
from live.worker.world import World
from support.servers import running
from support.waiting import until
from towline.bus.client import Bus
from towline.config import BusSettings
from towline.local.servers import NatsServer


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[NatsServer]:
    yield from running(NatsServer(tmp_path / "nats"))


@pytest.fixture
async def shaky(own_server: NatsServer, tmp_path: Path, run_name: str) -> AsyncIterator[Scene]:
    settings = own_server.settings(BusSettings(budget_bytes=256 << 20))
    bus = await Bus.connect(settings, run=run_name, client_name="test")
    await bus.ensure()
    found = Scene(World(bus, tmp_path, run_name), settings)
    yield found
    await found.close()
    await bus.close()


@pytest.mark.slow
async def test_a_stream_goes_on_after_the_bus_was_killed(shaky: Scene, own_server: NatsServer) -> None:
    shaky.seed()
    worker = (await shaky.worker(engine="synthetic", arguments={"tokens_per_second": 60.0})).worker
    client = await shaky.gateway(resume_seconds=60.0)
    given: dict[str, Any] = {
        "input_ids": spell("abc"), "sampling_params": {"max_new_tokens": 120, "sampling_seed": 5, "ignore_eos": True},
    }  # fmt: skip
    whole = (await client.post("/generate", json=given)).raise_for_status().json()["output_ids"]
    tokens: list[int] = []
    stream = given | {"stream": True, "incremental_streaming_output": True}
    async with client.stream("POST", "/generate", json=stream) as response:
        async for event in events(response):
            assert "error" not in event, event
            tokens += event["output_ids"] if event != "DONE" else []
            if len(tokens) == len(event.get("output_ids", []) if event != "DONE" else []):  # the first
                await asyncio.to_thread(own_server.kill)
                await asyncio.to_thread(own_server.start)
    assert tokens == whole
    await until(lambda: worker.busy == 0)
