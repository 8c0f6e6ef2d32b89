"""gRPC beside HTTP, in the same process and event loop: RolloutService, PolicyService, grpc.health.v1 and reflection.

It needs the extra `gateway`; nothing else of the gateway imports it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from towline.config import Settings
from towline.errors import UsageError
from towline.gateway.answers import ApiError
from towline.gateway.desk import Desk
from towline.gateway.fleet import Fleet
from towline.gateway.grpc_policy import Policy
from towline.gateway.grpc_rollout import Rollouts
from towline.gateway.grpc_status import Guard, abort
from towline.gateway.metering import Metering
from towline.gateway.plans import Planner
from towline.gateway.tenants import Tenants
from towline.pb import policy_pb2, rollout_pb2
from towline.pb.policy_pb2_grpc import add_PolicyServiceServicer_to_server
from towline.pb.rollout_pb2_grpc import add_RolloutServiceServicer_to_server

NAMES = tuple(
    pb.DESCRIPTOR.services_by_name[name].full_name
    for pb, name in ((rollout_pb2, "RolloutService"), (policy_pb2, "PolicyService"))
)
HEALTH_SECONDS = 0.25
KEEPALIVE_SECONDS, ANSWER_SECONDS = 60, 20
"""A client that is silent for so long is asked for a sign of life; where none comes in the time after it, its calls are over."""
LEAST_PING_SECONDS = 10
"""Clients that ask more often are sent away."""


class GrpcServer:
    """`start` it inside the service's event loop; `port` is the one it listens on then. `UsageError` where it can't."""

    def __init__(
        self,
        settings: Settings,
        *,
        fleet: Fleet,
        desk: Desk,
        planner: Callable[[], Planner],
        tenants: Tenants,
        metering: Metering,
        not_ready: Callable[[], str | None],
    ) -> None:
        self._settings, self._fleet, self._desk, self._planner = settings.gateway, fleet, desk, planner
        self._run, self._tenants, self._guard, self._not_ready = settings.run.name, tenants, Guard(tenants, metering), not_ready
        self._closing = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        self._telling: asyncio.Task[None] | None = None
        self.port: int | None = None

    async def start(self) -> None:
        self._server = server = grpc.aio.server(
            interceptors=[_OnlyTenants(self._tenants)],
            options=[
                ("grpc.max_receive_message_length", self._settings.max_body_bytes), ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0), ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
                ("grpc.keepalive_timeout_ms", ANSWER_SECONDS * 1000),
                ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PING_SECONDS * 1000),
            ],
        )  # fmt: skip
        rollouts = Rollouts(self._settings, desk=self._desk, planner=self._planner, guard=self._guard)
        add_RolloutServiceServicer_to_server(rollouts, server)
        add_PolicyServiceServicer_to_server(Policy(self._run, self._fleet, self._guard, self._closing), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        self.port = self._listen(server)
        await server.start()
        self._telling = asyncio.create_task(self._tell(), name="grpc-health")

    async def close(self, seconds: float) -> None:
        """Accept nothing more, let running calls end within that time, then cut them."""
        self._closing.set()
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        if self._server is not None:
            await self._health.enter_graceful_shutdown()
            await self._server.stop(seconds)

    def _listen(self, server: grpc.aio.Server) -> int:
        mine = self._settings
        host = f"[{mine.host}]" if ":" in mine.host else mine.host
        address = f"{host}:{mine.grpc_port}"
        try:
            if mine.tls_key:
                pair = (Path(mine.tls_key).read_bytes(), Path(mine.tls_certificate).read_bytes())
                return server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
            return server.add_insecure_port(address)
        except (RuntimeError, OSError) as error:
            raise UsageError(
                f"gateway.host = {mine.host}, gateway.grpc_port = {mine.grpc_port}: {error}", code="gateway_port"
            ) from None

    async def _tell(self) -> None:
        """grpc.health.v1's status, for the whole server and each service."""
        while True:
            serving = self._not_ready() is None
            state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
            for name in ("", *NAMES):
                await self._health.set(name, state)
            await asyncio.sleep(HEALTH_SECONDS)


class _OnlyTenants(grpc.aio.ServerInterceptor):
    """Reflection is for tenants too, as /openapi.json is. Towline's own services ask for the token themselves, health is open."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        if details.method.startswith("/grpc.reflection."):
            given = dict(details.invocation_metadata or ()).get("authorization", "")
            try:
                self._tenants.of(given if isinstance(given, str) else "")
            except ApiError as error:
                return _refusing(error)
        return await continuation(details)


def _refusing(fault: ApiError) -> Any:
    async def refuse(requests: Any, context: Any) -> None:
        await abort(context, fault)

    return grpc.stream_stream_rpc_method_handler(refuse)
