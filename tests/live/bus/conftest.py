"""A bus on the session's server, and servers of their own for tests that kill or fill one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from support.servers import running
from towline.bus.client import Bus
from towline.config import BusSettings
from towline.local.servers import NatsServer


@pytest.fixture
async def bus(bus_settings: BusSettings, run_name: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test")
    await bus.ensure()
    yield bus
    await bus.close()


@pytest.fixture(scope="module")
def mortal_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server that the module's tests may kill and start again; each test finds it running."""
    yield from running(NatsServer(tmp_path_factory.mktemp("mortal-nats")))


@pytest.fixture
def mortal(mortal_server: NatsServer) -> Iterator[BusSettings]:
    mortal_server.start()
    yield mortal_server.settings(BusSettings(budget_bytes=256 << 20))
    mortal_server.start()
