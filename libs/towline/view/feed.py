"""What a view reads: a `Source`, and for a run whose bus is there what its processes, its fleet and its streams say now."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from towline.bundle.source import BusSource, Source, decode_acks
from towline.bus.client import Bus, StreamState
from towline.bus.topology import ACKS, CONTROL, DEAD, OUTCOME, REPLICAS, STATUS, TRAJECTORY, StreamSpec
from towline.config import Settings
from towline.contract.policy import Ack, ReplicaInfo, decode_replica
from towline.replica.fleet import decoded
from towline.report.figures import Status, decode_statuses
from towline.store.log import Log
from towline.store.objects import ObjectStore

STREAMS: tuple[StreamSpec, ...] = (CONTROL, TRAJECTORY, OUTCOME, DEAD)


@dataclass(frozen=True, slots=True)
class Now:
    """As of `at`, Unix seconds. A bundle has acks alone."""

    at: float
    statuses: list[Status] = field(default_factory=list)
    replicas: list[ReplicaInfo] = field(default_factory=list)
    acks: list[Ack] = field(default_factory=list)
    streams: dict[str, StreamState] = field(default_factory=dict)


class Feed(Protocol):
    """`follows_log`: whether somebody else reads the source's LOG on."""

    @property
    def source(self) -> Source: ...

    @property
    def live(self) -> bool: ...

    @property
    def follows_log(self) -> bool: ...

    async def now(self, at: float) -> Now: ...


class BusFeed:
    """Of a run whose bus is there, running or not."""

    live = True

    def __init__(self, bus: Bus, source: Source, *, follows_log: bool = False) -> None:
        self._bus, self.source, self.follows_log = bus, source, follows_log

    @classmethod
    def of(cls, bus: Bus, objects: ObjectStore, settings: Settings, log: Log) -> BusFeed:
        """For who follows the run's LOG anyway."""
        return cls(bus, BusSource(bus, objects, settings, log), follows_log=True)

    async def now(self, at: float) -> Now:
        statuses, replicas, acks = await asyncio.gather(*[self._bus.kv(spec).items() for spec in (STATUS, REPLICAS, ACKS)])
        states = await asyncio.gather(*[self._bus.stream_state(spec) for spec in STREAMS])
        return Now(
            at, decode_statuses(statuses), decoded(replicas, decode_replica), decode_acks(acks.values()),
            {spec.key: state for spec, state in zip(STREAMS, states, strict=True)},
        )  # fmt: skip


class StillFeed:
    """Of a bundle: nothing changes."""

    live, follows_log = False, False

    def __init__(self, source: Source) -> None:
        self.source = source

    async def now(self, at: float) -> Now:
        return Now(at, acks=await self.source.acks())
