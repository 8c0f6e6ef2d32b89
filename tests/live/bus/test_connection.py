"""A lost connection comes back, however nats-py's client took its end."""

from __future__ import annotations

from support.waiting import until
from towline.bus.client import Bus
from towline.bus.topology import TRAJECTORY


async def test_a_client_that_fails_amid_its_closing_is_replaced(bus: Bus) -> None:
    """The line dies while messages wait to be sent: nats-py sends them once more as it closes, which fails, and tells nobody that
    it has closed. (A worker of a killed server stood still so, for ever.)"""
    await bus.create(bus.topology.trajectory(0, 0), b"before")
    client = bus.connection._client
    assert client is not None

    async def drain() -> None:
        client._pending.append(b"PING\r\n")
        client._pending_data_size += 6
        raise ConnectionResetError("Connection lost")

    lost: list[None] = []
    bus.connection.on_change(lambda: lost.append(None))
    assert client._transport is not None
    client._transport.drain = drain
    await bus.create(bus.topology.trajectory(0, 1), b"on its way")
    await until(lambda: client.is_closed and lost == [None])
    created = await bus.create(bus.topology.trajectory(0, 2), b"after")
    assert created.won
    last = await bus.last(TRAJECTORY, bus.topology.trajectory(0, 2))
    assert last is not None
    assert last.data == b"after"
