"""How a client of nats-py ends: within a bound, also one whose line never came up, or that failed amid its closing."""

from __future__ import annotations

import asyncio
import contextlib

import nats.errors
from nats.aio.client import Client

CLOSE_SECONDS = 2
"""For what is still to be sent, and for closing."""


async def end(client: Client) -> None:
    """Close it, for at most two seconds: after a TLS handshake that failed nats-py would wait for ever."""
    with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await client.close()


async def put_away(client: Client) -> None:
    """End what a client left that didn't come to the end of its closing; nobody else looks at how its tasks ended."""
    left = [task for task in (client._flusher_task, client._reading_task, client._ping_interval_task) if task is not None]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=CLOSE_SECONDS)
    for task in left:
        if task.done() and not task.cancelled():
            task.exception()
    if client._transport is not None:
        client._transport.close()
