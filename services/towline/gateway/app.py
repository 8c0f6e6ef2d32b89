"""The API's routes. What a stream begins with is known before its status is sent, so a refusal is never hidden in one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from towline import spans
from towline.config import Settings
from towline.gateway import answers
from towline.gateway.answers import ApiError, invalid
from towline.gateway.bodies import ChatBody, CompletionBody, GenerateBody, parse
from towline.gateway.desk import Desk, read_body
from towline.gateway.fleet import Fleet
from towline.gateway.formats import OpenAIFormat, generated
from towline.gateway.jobs import Choice, Job
from towline.gateway.metering import Metering
from towline.gateway.openapi import document
from towline.gateway.plans import Planner, bound_model
from towline.gateway.routing import Constraint
from towline.gateway.sessions import Sessions
from towline.gateway.streaming import HEADERS, Format, server_sent
from towline.gateway.tenants import Tenants
from towline.runtime.metrics import CONTENT_TYPE, Metrics

CONTROL_ROUTES = (
    "abort_request", "begin_weight_update", "check_weights", "clear_hicache_storage_backend", "close_session",
    "configure_logging",
    "continue_generation", "destroy_weights_update_group", "end_weight_update", "flush_cache", "freeze_gc",
    "get_weights_by_name", "init_weights_send_group_for_remote_instance", "init_weights_update_group",
    "load_lora_adapter", "open_session", "pause_generation", "pull_weights", "release_memory_occupation",
    "resume_memory_occupation", "send_weights_to_remote_instance", "set_internal_state", "slow_down", "start_profile",
    "stop_profile", "unload_lora_adapter", "update_weight_version", "update_weights_from_disk",
    "update_weights_from_distributed", "update_weights_from_ipc", "update_weights_from_tensor", "weights_checker",
)  # fmt: skip
"""SGLang's routes that change an engine. The fleet's weights come from the LOG alone."""
_log = structlog.get_logger("towline.gateway")
T = TypeVar("T")

Events = AsyncGenerator[list[Choice], None]


class Api:
    """The routes over one fleet. `not_ready` says why nothing can be served; None where it can."""

    def __init__(
        self,
        settings: Settings,
        *,
        fleet: Fleet,
        desk: Desk,
        planner: Callable[[], Planner],
        tenants: Tenants,
        metrics: Metrics,
        sessions: Sessions,
        not_ready: Callable[[], str | None],
    ) -> None:
        self._settings, self._fleet, self._desk, self._planner = settings, fleet, desk, planner
        self._tenants, self._metrics, self._not_ready = tenants, metrics, not_ready
        self._sessions, self._run = sessions, settings.run.name
        self.metering = Metering(metrics)

    def app(self) -> Starlette:
        at = self._at
        routes = [
            at("/generate", self._generate, "POST"),
            at("/v1/completions", self._completions, "POST"),
            at("/v1/chat/completions", self._chat, "POST"),
            *self._sessions.routes(at, self._served, self._tenants.admitted),
            at("/v1/models", self._models, "GET"),
            at("/server_info", self._server_info, "GET"),
            at("/wake", self._wake, "POST"),
            at("/metrics", self._metrics_page, "GET"),
            at("/openapi.json", self._openapi, "GET"),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._health, methods=["GET"]),
            *(at(f"/{name}", self._forbidden, "GET", "POST", "PUT") for name in CONTROL_ROUTES),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_fault})

    # Around every route

    def _at(self, path: str, handle: Callable[[Request, str], Awaitable[Response]], *methods: str) -> Route:
        async def answer(request: Request) -> Response:
            request.state.route = path
            try:
                tenant = self._tenants.of_request(request.headers)
                response = await handle(request, tenant)
            except ApiError as error:
                response = error.response()
            except answers.FAULTS as error:
                try:
                    response = answers.of(error).response()
                except answers.FAULTS:
                    _log.error("answer_failed", route=path, exc_info=error)
                    fault = ApiError(500, "internal_error", f"{type(error).__name__}: see the gateway's log")
                    response = fault.response()
            self.metering.answered(path, str(response.status_code))
            return response

        return Route(path, answer, methods=list(methods))

    async def _served(
        self, request: Request, tenant: str, begin: Callable[[bytes], Awaitable[tuple[Job, Format, bool]]]
    ) -> Response:
        """`begin` makes the job of the body: (job, its format, whether it's streamed)."""
        began, path = time.monotonic(), _path(request)
        stack = contextlib.AsyncExitStack()
        async with stack:
            span = stack.enter_context(spans.request("gateway.request", request.headers.get(spans.TRACEPARENT)))
            if span:
                span.set(route=path, tenant=tenant)
            stack.enter_context(self._tenants.admitted(tenant))
            stack.enter_context(self.metering.request(path, began))
            body = await read_body(request, self._settings.gateway.max_body_bytes)
            job, form, streamed = await begin(body)
            if not streamed:
                await _unless_gone(request, job.finished())
                self.metering.sent(path, job.completion_tokens)
                await form.keep()
                return JSONResponse(form.whole())
            events = await stack.enter_async_context(contextlib.aclosing(job.events()))
            first = await _unless_gone(request, _first(events))
            self.metering.first_tokens(path, began)
            told = self._told(first, events, job, form, path)
            await stack.enter_async_context(contextlib.aclosing(told))
            return _Streamed(told, stack.pop_all())

    async def _told(
        self, first: list[Choice] | None, events: Events, job: Job, form: Format, path: str
    ) -> AsyncGenerator[bytes, None]:
        try:
            async for event in server_sent(first, events, job.choices, form, path):
                yield event
        finally:
            self.metering.sent(path, job.completion_tokens)

    # What is served

    async def _generate(self, request: Request, tenant: str) -> Response:
        async def begin(data: bytes) -> tuple[Job, Format, bool]:
            body = parse(GenerateBody, data)
            planner = self._planner()
            plan, job = await self._desk.job(
                request, tenant=tenant, route="/generate", body=data, prefix="gen-", make=lambda: planner.generate(body)
            )
            single = not isinstance(body.input_ids or body.text, list) or isinstance((body.input_ids or [[]])[0], int)
            return job, SglangFormat(body, job, alone=bool(single and plan.n == 1)), body.stream

        return await self._served(request, tenant, begin)

    async def _completions(self, request: Request, tenant: str) -> Response:
        async def begin(data: bytes) -> tuple[Job, Format, bool]:
            body = parse(CompletionBody, data)
            planner, constraint = self._planner(), bound_model(body.model, self._run, body.constraint)
            _, job = await self._desk.job(
                request, tenant=tenant, route="/v1/completions", body=data, prefix="cmpl-",
                make=lambda: planner.completion(body, constraint),
            )  # fmt: skip
            return job, OpenAIFormat(body, job, self._fleet.lineage), body.stream

        return await self._served(request, tenant, begin)

    async def _chat(self, request: Request, tenant: str) -> Response:
        async def begin(data: bytes) -> tuple[Job, Format, bool]:
            body = parse(ChatBody, data)
            planner, constraint = self._planner(), bound_model(body.model, self._run, body.constraint)
            _, job = await self._desk.job(
                request, tenant=tenant, route="/v1/chat/completions", body=data, prefix="chatcmpl-",
                make=lambda: planner.chat(body, constraint),
            )  # fmt: skip
            return job, OpenAIFormat(body, job, self._fleet.lineage, planner.calls(body.callable_tools)), body.stream

        return await self._served(request, tenant, begin)

    # What is told

    async def _models(self, request: Request, tenant: str) -> Response:
        versions = self._fleet.versions()
        created = int(self._fleet.started_at)
        names = [(self._run, None), *((f"{self._run}@{version}", version) for version in versions)]
        data = [
            {
                "id": name, "object": "model", "created": created, "owned_by": "towline", "weight_version": version,
                "weight_versions": [version] if version is not None else list(versions),
            }
            for name, version in names
        ]  # fmt: skip
        return JSONResponse({"object": "list", "data": data})

    async def _server_info(self, request: Request, tenant: str) -> Response:
        lineage, settings = self._fleet.lineage, self._settings
        known, asked = 0 in lineage, request.query_params.get("version", "")
        if asked and not (asked.isascii() and asked.isdigit() and len(asked) <= 18):
            raise invalid(f"version: {asked[:30]!r} isn't a version's number")
        return JSONResponse(
            {
                "model_path": self._run, "run": self._run, "engine": settings.rollout.engine,
                "context_length": settings.rollout.max_context_tokens,
                "latest_version": lineage.latest if known else None, "depth": lineage.depth(lineage.latest) if known else None,
                "applied": self._fleet.applied(), "versions": {str(v): count for v, count in self._fleet.versions().items()},
                "replicas": [
                    {
                        "replica": one.name, "version": one.version, "slots": one.slots, "load": one.load, "usable": one.usable,
                        "pinned": one.pinned,
                    }
                    for one in self._fleet.candidates()
                ],
                "running": self.metering.running,
                # Whether a request with min_version = `version` would find a replica.
                **({"met": self._fleet.met(Constraint(min_version=int(asked)))} if asked else {}),
            }
        )  # fmt: skip

    async def _wake(self, request: Request, tenant: str) -> Response:
        """Replicas don't sleep: there is one, or 503."""
        return self._readiness()

    async def _health(self, request: Request) -> Response:
        return self._readiness()

    def _readiness(self) -> Response:
        if (why := self._not_ready()) is not None:
            return answers.unavailable(why).response()
        return JSONResponse({"status": "ready", "applied": self._fleet.applied()})

    async def _metrics_page(self, request: Request, tenant: str) -> Response:
        return Response(self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _openapi(self, request: Request, tenant: str) -> Response:
        return JSONResponse(document(self._run))

    async def _forbidden(self, request: Request, tenant: str) -> Response:
        raise ApiError(403, "permission_error", "engines aren't controlled here: versions come from the run's LOG alone")


class _Streamed(StreamingResponse):
    """Server-sent events. What the request holds is let go when the response is over, also where it never began: of a client
    that has left by then, nothing of the content is asked for."""

    def __init__(self, content: AsyncIterator[bytes], held: contextlib.AsyncExitStack) -> None:
        super().__init__(content, media_type="text/event-stream", headers=HEADERS)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


class SglangFormat:
    """The answer to one /generate: a dict, or a list of them where there are several prompts or samples."""

    def __init__(self, body: GenerateBody, job: Job, *, alone: bool) -> None:
        self._body, self._job, self._alone = body, job, alone
        self._told: dict[int, tuple[int, int]] = {}

    def whole(self) -> Any:
        found = [generated(choice, self._job, self._body) for choice in self._job.choices]
        return found[0] if self._alone else found

    def pieces(self, moved: list[Choice]) -> list[dict[str, Any]]:
        found = []
        for choice in moved:
            start, text_start = self._told.get(choice.index, (0, 0)) if self._body.incremental_streaming_output else (0, 0)
            piece = generated(choice, self._job, self._body, start=start, text_start=text_start)
            self._told[choice.index] = (choice.seen, len(choice.text))
            found.append(piece if self._alone else {"index": choice.index, **piece})
        return found

    def last_piece(self) -> None:
        return None

    async def keep(self) -> None:
        """Nothing is kept beside the idempotency record."""


def _path(request: Request) -> str:
    """For metrics and logs: the route's, never the request's own, of which there are as many as anybody likes."""
    return str(request.state.route)


async def _first(events: Events) -> list[Choice] | None:
    return await anext(events, None)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives, as long as somebody waits for it."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_until_gone(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "client_closed_request", "the client went away")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _http_fault(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    return ApiError(error.status_code, "invalid_request_error", f"{request.url.path}: {error.detail}", headers=headers).response()
