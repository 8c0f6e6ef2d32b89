"""PolicyService: which versions are served, now and as that changes."""

from __future__ import annotations

import asyncio

from towline.errors import MissingError
from towline.gateway.answers import unavailable
from towline.gateway.fleet import Fleet
from towline.gateway.grpc_status import Context, Guard
from towline.pb import policy_pb2 as pb
from towline.pb.policy_pb2_grpc import PolicyServiceServicer

SERVICE = "/towline.v1.PolicyService/"
LOOK_SECONDS = 1.0
"""A replica that was found dead tells nobody: what is served is looked at again so often."""


class Policy(PolicyServiceServicer):
    """`closing` ends the watches."""

    def __init__(self, run: str, fleet: Fleet, guard: Guard, closing: asyncio.Event) -> None:
        self._run, self._fleet, self._guard, self._closing = run, fleet, guard, closing

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.PolicyStatus:
        async with self._guard.call(f"{SERVICE}GetStatus", context):
            return self._status()

    async def WatchVersions(self, request: pb.WatchVersionsRequest, context: Context) -> None:  # type: ignore[override]
        async with self._guard.call(f"{SERVICE}WatchVersions", context):
            told: pb.PolicyStatus | None = None
            while not self._closing.is_set():
                if (status := self._status()) != told:
                    told = status
                    await context.write(status)
                await self._fleet.wait(LOOK_SECONDS)
            raise unavailable("the gateway drains: watch another one")

    def _status(self) -> pb.PolicyStatus:
        lineage, found = self._fleet.lineage, pb.PolicyStatus(run=self._run, applied=self._fleet.applied())
        if 0 in lineage:
            found.latest_version, found.latest_depth = lineage.latest, lineage.depth(lineage.latest)
        for version, replicas in self._fleet.versions().items():
            try:
                depth = lineage.depth(version)
            except MissingError:  # its replica has read further in the LOG than this gateway
                continue
            found.serving.append(pb.ServingVersion(version=version, replicas=replicas, depth=depth))
        return found
