"""Sessions over HTTP: a conversation whose tokens stand, turn by turn, exactly as the engine saw and sampled them.

A gateway keeps nothing of one: each request reads the session, changes it and writes it by revision before its client hears of
anything. So any gateway goes on with it, and of two requests that change it at the same time one wins.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from towline.bus.client import Bus
from towline.config import Settings
from towline.contract.trajectory import Trajectory
from towline.errors import ConflictError
from towline.gateway.answers import ApiError, invalid
from towline.gateway.bodies import FinishBody, SessionBody, SessionChatBody, parse
from towline.gateway.desk import Desk, read_body
from towline.gateway.external import publish, trajectory_of
from towline.gateway.fleet import Fleet
from towline.gateway.formats import OpenAIFormat
from towline.gateway.jobs import Job
from towline.gateway.plans import Planner, bound_model
from towline.gateway.session_store import LONGEST_SECONDS, Content, Finish, Held, SessionStore, conflict
from towline.runtime.metrics import Metrics
from towline.session.record import decode_session, encode_session
from towline.session.tree import Place, Session

CHAT = "/sessions/{session}/v1/chat/completions"

Handle = Callable[[Request, str], Awaitable[Response]]
Begin = Callable[[bytes], Awaitable[tuple[Job, Any, bool]]]
Serve = Callable[[Request, str, Begin], Awaitable[Response]]


class TurnFormat(OpenAIFormat):
    """The answer to a turn. `keep` first: what isn't kept mustn't be told."""

    def __init__(self, body: SessionChatBody, job: Job, fleet: Fleet, keep: Callable[[Job], Awaitable[dict[str, Any]]]) -> None:
        super().__init__(body, job, fleet.lineage)
        self._turn, self._keep, self._said = job, keep, dict[str, Any]()

    async def keep(self) -> None:
        self._said = await self._keep(self._turn)

    def whole(self) -> dict[str, Any]:
        return {**super().whole(), "session": self._said}


class Sessions:
    """The routes of one gateway."""

    def __init__(
        self,
        settings: Settings,
        *,
        bus: Bus,
        store: SessionStore,
        desk: Desk,
        fleet: Fleet,
        planner: Callable[[], Planner],
        metrics: Metrics,
        replica: str,
    ) -> None:
        self._settings, self._bus, self._store = settings, bus, store
        self._desk, self._fleet, self._planner, self._replica = desk, fleet, planner, replica
        self._mismatches = metrics.counter("session_mismatches_total", "histories that differed from what was said", ["kind"])
        self._finished = metrics.counter("sessions_finished_total", "sessions that became trajectories")

    def routes(
        self,
        route: Callable[[Handle], Callable[[Request], Awaitable[Response]]],
        serve: Serve,
        admitted: Callable[[str], AbstractContextManager[None]],
    ) -> list[Route]:
        """`route` wraps every handler, `serve` runs a job, `admitted` holds the tenant's place while a request runs."""

        def brief(handle: Handle) -> Callable[[Request], Awaitable[Response]]:
            async def answer(request: Request, tenant: str) -> Response:
                with admitted(tenant):
                    return await handle(request, tenant)

            return route(answer)

        async def chat(request: Request, tenant: str) -> Response:
            return await serve(request, tenant, lambda data: self._begin(request, tenant, data))

        return [
            Route("/sessions", brief(self._open), methods=["POST"]),
            Route("/sessions/{session}", brief(self._tell), methods=["GET"]),
            Route("/sessions/{session}", brief(self._delete), methods=["DELETE"]),
            Route("/sessions/{session}/rollback", brief(self._rollback), methods=["POST"]),
            Route("/sessions/{session}/finish", brief(self._finish), methods=["POST"]),
            Route(CHAT, route(chat), methods=["POST"]),
        ]

    async def _open(self, request: Request, tenant: str) -> Response:
        body = parse(SessionBody, await self._body(request))
        seconds = LONGEST_SECONDS if body.ttl_seconds is None else body.ttl_seconds
        if seconds > LONGEST_SECONDS:
            raise invalid(f"ttl_seconds: {seconds:g} is over {LONGEST_SECONDS:g}, the longest that a session stands unchanged")
        # Where this model can have no sessions, its first turn is too late to say so.
        await asyncio.to_thread(self._planner().boundary, body.chat_template_kwargs)
        content = Content(created=time.time(), variables=body.chat_template_kwargs, tools=body.tools)
        held = await self._store.create(tenant, content, seconds)
        return JSONResponse({"id": held.id, "expires_at": held.entry.expires_at}, 201)

    async def _begin(self, request: Request, tenant: str, data: bytes) -> tuple[Job, Any, bool]:
        body = parse(SessionChatBody, data)
        constraint = bound_model(body.model, self._settings.run.name, body.constraint)
        held = await self._load(request, tenant, change=True)
        first = held.content.sampling
        if first is not None:
            if body.temperature not in (None, first.temperature):
                raise invalid(
                    f"temperature: this session samples at {first.temperature:g}, and a trajectory has one; begin another session"
                )
            body.temperature = first.temperature
        planner = self._planner()

        def prepare() -> tuple[Session, Place, dict[str, int]]:
            session = self._session(held.content)
            before = dict(session.mismatches)
            tools = held.content.tools if body.tools is None else body.tools
            place = session.place([message.plain() for message in body.messages], tools)
            return session, place, before

        session, place, before = await asyncio.to_thread(prepare)
        if not place.prompt:
            raise invalid("messages: the chat template made an empty prompt of them")
        prompt = list(place.prompt)
        _, job = await self._desk.job(
            request, tenant=tenant, route=request.url.path, body=data, prefix="chatcmpl-",
            make=lambda: planner.turn(body, prompt, constraint, held.id),
        )  # fmt: skip
        if job.choices[0].ask.prompt != prompt:
            raise conflict("the session has changed since this Idempotency-Key was used first: send the turn under a new key")

        async def keep(done: Job) -> dict[str, Any]:
            said = await self._keep(held, session, place, done)
            for kind, count in session.mismatches.items():
                self._mismatches.labels(kind).inc(count - before.get(kind, 0))
            return said

        return job, TurnFormat(body, job, self._fleet, keep), False

    async def _keep(self, held: Held, session: Session, place: Place, job: Job) -> dict[str, Any]:
        (choice,) = job.choices
        sample, finish = choice.sample, choice.finish
        if finish != "stop" and finish != "length":
            raise ApiError(
                409, "superseded", "the replicas left the version that the turn asked for: nothing of it is kept, send it again"
            )

        def record() -> tuple[int, bytes]:
            node = _again(session, place, sample.tokens, sample.logprobs)
            if node is None:
                message = {"role": "assistant", "content": choice.text}
                node = session.said(place, sample.tokens, sample.logprobs, sample.spans, finish, message)
            session.head = node
            return node, encode_session(session)

        node, data = await asyncio.to_thread(record)
        changed = msgspec.structs.replace(held.content, session=data, sampling=choice.ask.sampling, seed=choice.ask.seed)
        await self._store.save(held, changed)
        return {"id": held.id, "node": node, "turns": _turns(session), "mismatches": dict(session.mismatches)}

    async def _tell(self, request: Request, tenant: str) -> Response:
        held = await self._load(request, tenant)

        def view() -> dict[str, Any]:
            session = self._session(held.content)
            nodes = [
                {
                    "node": number, "parent": node.parent, "kind": node.kind, "tokens": node.tokens, "logprobs": node.logprobs,
                    "spans": [[span.start, span.end, span.version, span.cut] for span in node.spans],
                    "messages": node.messages, "finish_reason": node.finish or None,
                }
                for number, node in enumerate(session.nodes)
            ]  # fmt: skip
            return {
                "id": held.id, "state": held.content.state, "created": held.content.created,
                "expires_at": held.entry.expires_at, "family": session.boundary.family, "head": session.head,
                "path": session.path(), "turns": _turns(session), "tokens": session.tokens(), "nodes": nodes,
                "mismatches": dict(session.mismatches),
            }  # fmt: skip

        answer = await asyncio.to_thread(lambda: msgspec.json.encode(view()))
        return Response(answer, media_type="application/json")

    async def _rollback(self, request: Request, tenant: str) -> Response:
        await self._body(request)
        held = await self._load(request, tenant, change=True)

        def record() -> tuple[Session, bytes]:
            session = self._session(held.content)
            session.rollback()
            return session, encode_session(session)

        try:
            session, data = await asyncio.to_thread(record)
        except ConflictError as error:
            raise conflict(error.message) from error
        await self._store.save(held, msgspec.structs.replace(held.content, session=data))
        return JSONResponse(
            {"id": held.id, "head": session.head, "turns": _turns(session), "mismatches": dict(session.mismatches)}
        )

    async def _delete(self, request: Request, tenant: str) -> Response:
        await self._store.delete(await self._load(request, tenant))
        return JSONResponse({"id": request.path_params["session"], "deleted": True})

    async def _finish(self, request: Request, tenant: str) -> Response:
        """In three steps, each of which a repeat goes on from: nothing may change any more; published; said to be so."""
        body = parse(FinishBody, await self._body(request) or b"{}")
        held = await self._load(request, tenant)
        wanted = Finish(
            name=f"{tenant}/{body.group or held.id}", sample=body.sample, group_size=body.group_size, reference=body.reference,
            at=time.time(),
        )  # fmt: skip
        standing = held.content.finish
        if standing is None:
            content = msgspec.structs.replace(held.content, state="finishing", finish=wanted)
            await self._made(held.id, content)  # what can't be finished stays open
            held = await self._store.save(held, content)
        elif msgspec.structs.replace(wanted, at=standing.at) != standing:
            raise conflict(f"session {held.id} was finished otherwise: as sample {standing.sample} of {standing.name!r}")
        trajectory = await self._made(held.id, held.content)
        subject, sequence = await publish(self._bus, trajectory)
        if sequence is None:
            await self._store.save(held, msgspec.structs.replace(held.content, state="open", finish=None))
            raise conflict(f"sample {body.sample} of group {body.group!r} stands already: give another sample or group")
        if held.content.state != "finished":
            await self._store.save(held, msgspec.structs.replace(held.content, state="finished"))
            self._finished.inc()
        return JSONResponse(
            {
                "id": held.id, "group": trajectory.group, "sample": trajectory.sample, "group_size": trajectory.group_size,
                "subject": subject, "sequence": sequence, "tokens": int(trajectory.tokens.size),
                "policy_tokens": trajectory.policy_tokens, "weight_version_start": trajectory.version_start,
                "weight_version_end": trajectory.version_end,
            }
        )  # fmt: skip

    async def _made(self, name: str, content: Content) -> Trajectory:
        settings, sampling, finish = self._settings, content.sampling, content.finish
        if sampling is None or finish is None:
            raise conflict("the session has no turn of the policy: there is nothing to finish")
        if sampling.temperature <= 0:
            raise conflict("the session was sampled greedily (temperature 0): its logprobs can't be trained on")
        try:
            return await asyncio.to_thread(
                lambda: trajectory_of(
                    self._session(content), name, content, sampling, finish, settings, f"gateway-{self._replica}"
                )
            )
        except ConflictError as error:
            raise conflict(error.message) from error

    # Common to them

    async def _load(self, request: Request, tenant: str, *, change: bool = False) -> Held:
        held = await self._store.load(request.path_params["session"], tenant)
        if change and held.content.state != "open":
            raise conflict(f"session {held.id} is {held.content.state}: begin another one")
        return held

    def _session(self, content: Content) -> Session:
        boundary = self._planner().boundary(content.variables)
        return decode_session(content.session, boundary) if content.session else Session(boundary)

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._settings.gateway.max_body_bytes)


def _turns(session: Session) -> int:
    return sum(session.nodes[number].kind == "policy" for number in session.path())


def _again(session: Session, place: Place, tokens: list[int], logprobs: list[float]) -> int | None:
    """The node that says this there already: the repeat of a turn whose answer was lost adds nothing."""
    for number, node in enumerate(session.nodes):
        same = node.parent == place.node and node.kind == "policy" and node.tokens == tuple(tokens)
        if same and all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(node.logprobs, logprobs, strict=True)):
            return number
    return None
