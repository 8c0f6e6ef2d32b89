"""What a run needs before its services start, made by the one role that may: bucket, streams, key-value buckets, consumers.

It can be repeated at any time; a changed budget is followed. A store that doesn't keep its word is refused here.
"""

from __future__ import annotations

import asyncio

from towline.access.identity import as_role
from towline.access.roles import INIT
from towline.bus.address import without_user
from towline.bus.client import Bus
from towline.bus.consumer import Consumer
from towline.bus.sites import SITE_BUCKETS, SITE_STREAMS
from towline.bus.topology import BUCKETS, STREAMS, ConsumerSpec, Topology
from towline.config import Settings
from towline.contract.task import TRAIN
from towline.errors import UsageError
from towline.store.honesty import prove
from towline.store.objects import open_store
from towline.store.s3 import S3Store


async def initialise(settings: Settings) -> list[str]:
    """Make what is missing, as role init; a line for each thing that is there now. Raises the `TowlineError` that forbids it."""
    own = as_role(settings, INIT)
    told = [await asyncio.to_thread(_store, own)]
    await prepare_bus(settings)
    streams, buckets = (SITE_STREAMS, SITE_BUCKETS) if own.bus.site else (STREAMS, BUCKETS)
    counted = f"{len(streams)} streams, {len(buckets)}"
    consumers = ", ".join(spec.durable for spec in _consumers(own))
    told.append(f"bus {without_user(own.bus.url)}: {counted} buckets, consumers {consumers}")
    return told


async def prepare_bus(settings: Settings) -> None:
    """Streams, buckets and the consumers that services share, made as role init. A consumer that is there stays as it is."""
    own = as_role(settings, INIT)
    bus = await Bus.connect(own.bus, run=own.run.name, client_name=f"init-{own.run.name}")
    try:
        await _check_domain(bus, own)
        await bus.ensure()
        for spec in _consumers(own):
            await Consumer(bus.jetstream, spec, None).ensure()
    finally:
        await bus.close()


async def _check_domain(bus: Bus, settings: Settings) -> None:
    """With sites, home's streams and a site's differ: what is made on the other's server couldn't be changed afterwards."""
    wanted = settings.bus.site or (settings.bus.home_domain if settings.bus.sites else "")
    if not wanted:
        return
    found = (await bus.jetstream.call("ask for the JetStream domain", "INFO")).get("domain", "")
    if found != wanted:
        raise UsageError(
            f"the bus at {without_user(settings.bus.url)} has JetStream domain {found!r}, not {wanted!r}: correct bus.url or "
            f"bus.site, or the server's `jetstream {{ domain: {wanted} }}`",
            code="bus_domain",
        )


def _consumers(settings: Settings) -> list[ConsumerSpec]:
    topology, rollout = Topology(settings.run.name, settings.bus.site), settings.rollout
    lane = topology.lane_consumer(TRAIN, rollout.replicas * rollout.slots, ack_wait_seconds=rollout.ack_wait_seconds)
    if topology.site:
        return [lane]
    return [
        lane,
        topology.reward_consumer(ack_wait_seconds=settings.reward.ack_wait_seconds),
        topology.publisher_consumer(),
    ]


def _store(settings: Settings) -> str:
    objects = open_store(settings.store)
    made = isinstance(objects, S3Store) and objects.make_bucket()
    prove(objects)
    return f"store {objects.url}: {'bucket made, ' if made else ''}of several writers of one key one wins"
