"""The replicas that are alive, and how many tasks may be out to them: each lane's max_ack_pending is twice their slots."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping

import structlog

from towline.buffer.presence import HOME, Listener, Presence
from towline.bus.client import Bus, Consumer
from towline.bus.topology import REPLICAS
from towline.contract.policy import ReplicaInfo, decode_replica
from towline.contract.task import EVAL, TRAIN
from towline.errors import MalformedError, MissingError
from towline.store.lineage import Lineage

_say = structlog.get_logger("towline.buffer.fleet")


class Fleet:
    """`refresh` now and then; `prepare` before tasks of an eval version are issued."""

    def __init__(self, bus: Bus, ack_wait_seconds: float, site_silent_seconds: float = math.inf) -> None:
        self.replicas: list[ReplicaInfo] = []
        self.presence = Presence()
        self._listener = Listener(bus.topology.sites, site_silent_seconds)
        self._bus = bus
        self._ack_wait_seconds = ack_wait_seconds
        self._lanes: dict[int | None, tuple[Consumer, int]] = {}
        """None (lane train) or an eval version -> its consumer and the slots that it was last told of."""

    @property
    def slots(self) -> int:
        return sum(replica.slots for replica in self.replicas)

    @property
    def twice(self) -> Mapping[str, tuple[str, str]]:
        """Names that two replicas have, and where both are; "" is home."""
        return self._listener.twice

    async def refresh(self, eval_versions: Iterable[int]) -> None:
        """Read the registry; make lane train's consumer and those of `eval_versions` where they're missing, tell each of
        the slots there are, and let go of the others."""
        found = []
        for data in (await self._bus.kv(REPLICAS).items()).values():
            with contextlib.suppress(MalformedError):  # of another release: its tasks are its own, only its slots don't count
                found.append(decode_replica(data))
        self.replicas = [replica for replica in found if replica.state != "failed"]
        known = len(self._listener.twice)
        self.presence = self._listener.hear(self.replicas, time.monotonic())
        for name, places in list(self._listener.twice.items())[known:]:
            _say.error(
                "replica_twice", replica=name, at=[place or "home" for place in places], mend="give one of them another name"
            )
        wanted: set[int | None] = {None, *eval_versions}
        for version in [version for version in self._lanes if version not in wanted]:
            await self._lanes.pop(version)[0].close()
        for version in wanted:
            await self.prepare(version)

    async def prepare(self, version: int | None) -> None:
        """The lane's consumer is there, before a task of it is issued, and knows the fleet's slots."""
        consumer, known = self._lanes.get(version, (None, -1))
        lane = TRAIN if version is None else EVAL
        slots = self.presence.slots.get(HOME, 0)  # a site's workers pull from its own lane
        spec = self._bus.topology.lane_consumer(lane, slots, version, self._ack_wait_seconds)
        if consumer is None:
            consumer = await self._bus.consumer(spec)
        if known != slots:
            await consumer.update(max_ack_pending=spec.max_ack_pending, ack_wait_seconds=spec.ack_wait_seconds)
        self._lanes[version] = (consumer, slots)

    def eligible(self, lineage: Lineage, not_before_depth: int) -> bool:
        """Whether a replica serves, or is on its way to, a version of the line with this depth."""
        for replica in self.replicas:
            if replica.state in ("starting", "preparing", "prepared", "activating", "following"):
                return True
            if replica.state == "serving" and replica.version is not None:
                with contextlib.suppress(MissingError):
                    if lineage.on_line(replica.version) and lineage.depth(replica.version) >= not_before_depth:
                        return True
        return False

    async def close(self) -> None:
        """Let go of the consumers; they stay for the workers."""
        for consumer, _ in self._lanes.values():
            await consumer.close()
        self._lanes.clear()
