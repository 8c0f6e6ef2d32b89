"""What a run needs before its services start, made by the one role that may: bucket, streams, key-value buckets, consumers.

It can be repeated at any time; a changed budget is followed. A store that doesn't keep its word is refused here.
"""

from __future__ import annotations

import asyncio

from towline.access.identity import as_role
from towline.access.nats import shared_consumers
from towline.access.roles import INIT
from towline.bus.client import Bus
from towline.bus.consumer import Consumer
from towline.bus.topology import BUCKETS, STREAMS, Topology
from towline.config import Settings
from towline.store.honesty import prove
from towline.store.objects import open_store
from towline.store.s3 import S3Store


async def initialise(settings: Settings) -> list[str]:
    """Make what is missing, as role init; a line for each thing that is there now. Raises the `TowlineError` that forbids it."""
    own = as_role(settings, INIT)
    told = [await asyncio.to_thread(_store, own)]
    bus = await Bus.connect(own.bus, run=own.run.name, client_name=f"init-{own.run.name}")
    try:
        await prepare_bus(bus)
    finally:
        await bus.close()
    consumers = ", ".join(spec.durable for spec in shared_consumers(Topology(own.run.name)))
    told.append(f"bus {own.bus.url}: {len(STREAMS)} streams, {len(BUCKETS)} buckets, consumers {consumers}")
    return told


async def prepare_bus(bus: Bus) -> None:
    """Streams, buckets and the consumers that services share. One that is there keeps its settings."""
    await bus.ensure()
    for spec in shared_consumers(bus.topology):
        await Consumer(bus.jetstream, spec, None).ensure()


def _store(settings: Settings) -> str:
    objects = open_store(settings.store)
    made = isinstance(objects, S3Store) and objects.make_bucket()
    prove(objects)
    return f"store {objects.url}: {'bucket made, ' if made else ''}of several writers of one key one wins"
