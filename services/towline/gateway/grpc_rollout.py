"""RolloutService: the samples of /generate over gRPC, by the same plans, jobs and idempotency records.

A call that its client cancels, or whose deadline passes, is taken back from the replicas: the handler's task is cancelled there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from towline.config import GatewaySettings
from towline.gateway.answers import invalid
from towline.gateway.desk import Desk
from towline.gateway.grpc_messages import News, body_of, identity, sample_of
from towline.gateway.grpc_status import Context, Guard, metadata
from towline.gateway.jobs import Job
from towline.gateway.plans import Planner
from towline.pb import rollout_pb2 as pb
from towline.pb.rollout_pb2_grpc import RolloutServiceServicer

SERVICE = "/towline.v1.RolloutService/"
SPARE_SECONDS = 0.25
"""Before a call's deadline a refusal is said rather than waited for."""


class Rollouts(RolloutServiceServicer):
    """One run's fleet."""

    def __init__(self, settings: GatewaySettings, *, desk: Desk, planner: Callable[[], Planner], guard: Guard) -> None:
        self._settings, self._desk, self._planner, self._guard = settings, desk, planner, guard

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        route = f"{SERVICE}Generate"
        async with self._guard.call(route, context) as (tenant, _):
            job = await self._job(request, context, tenant)
            await job.finished()
            self._guard.metering.sent(route, job.completion_tokens)
            return pb.GenerateResponse(samples=[sample_of(choice, job) for choice in job.choices])

    async def StreamGenerate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        # It writes by itself: a generator that is left at its `yield` isn't told that its call was cancelled.
        route = f"{SERVICE}StreamGenerate"
        async with self._guard.call(route, context) as (tenant, began):
            job = await self._job(request, context, tenant)
            news, first = News(job), True
            try:
                async with contextlib.aclosing(job.events()) as events:
                    async for moved in events:
                        if first:
                            self._guard.metering.first_tokens(route, began)
                            first = False
                        await context.write(news.event(moved))
            finally:
                self._guard.metering.sent(route, job.completion_tokens)

    async def _job(self, request: pb.GenerateRequest, context: Context, tenant: str) -> Job:
        body, planner = body_of(request), self._planner()
        _, job = await self._desk.planned(
            tenant=tenant, route=SERVICE, body=identity(request), prefix="gen-", make=lambda: planner.generate(body),
            key=metadata(context, "idempotency-key"), waits=self._waits(request, context),
        )  # fmt: skip
        return job

    def _waits(self, request: pb.GenerateRequest, context: Context) -> float:
        if not request.wait_seconds >= 0:  # nor NaN
            raise invalid(f"wait_seconds: {request.wait_seconds:g} isn't a time")
        bounds = [request.wait_seconds, self._settings.max_wait_seconds]
        if (left := context.time_remaining()) is not None:
            bounds.append(left - SPARE_SECONDS)
        return max(min(bounds), 0.0)
