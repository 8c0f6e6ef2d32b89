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
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from towline import faults
from towline.bus.client import Bus
from towline.config import Settings
from towline.errors import ConflictError
from towline.gateway.answers import ApiError, invalid
from towline.gateway.bodies import ClaimBody, FinishBody, SessionBody, SessionChatBody, parse
from towline.gateway.claims import Claims
from towline.gateway.claims_keys import ClaimKey
from towline.gateway.claims_turns import bind, claimed, left_of, task_of
from towline.gateway.desk import Desk, read_body, wait_seconds
from towline.gateway.finishing import Finisher
from towline.gateway.fleet import Fleet
from towline.gateway.formats import OpenAIFormat
from towline.gateway.jobs import Choice, Job
from towline.gateway.plans import Planner, bound_model
from towline.gateway.session_rooms import Rooms
from towline.gateway.session_store import LONGEST_SECONDS, Content, End, Finish, Held, SessionStore, conflict
from towline.gateway.streaming import Format
from towline.gateway.tool_calls import Reader
from towline.runtime.metrics import Metrics
from towline.session.messages import told
from towline.session.record import decode_session, encode_session
from towline.session.tree import Limits, Place, Session

CHAT = "/sessions/{session}/v1/chat/completions"

Handle = Callable[[Request, str], Awaitable[Response]]
Begin = Callable[[bytes], Awaitable[tuple[Job, Format, bool]]]
Serve = Callable[[Request, str, Begin], Awaitable[Response]]


class At(Protocol):
    def __call__(self, path: str, handle: Handle, *methods: str) -> Route: ...


class TurnFormat(OpenAIFormat):
    """The answer to a turn. `keep` first: what isn't kept mustn't be told."""

    def __init__(
        self,
        body: SessionChatBody,
        job: Job,
        fleet: Fleet,
        calls: Reader | None,
        keep: Callable[[Job], Awaitable[dict[str, Any]]],
    ) -> None:
        super().__init__(body, job, fleet.lineage, calls)
        self._turn, self._keep, self._said = job, keep, dict[str, Any]()

    async def keep(self) -> None:
        self._said = await self._keep(self._turn)

    def whole(self) -> dict[str, Any]:
        return {**super().whole(), "session": self._said}

    def pieces(self, moved: list[Choice]) -> list[dict[str, Any]]:
        """The last one has `session`: what came before it is kept then, and only then."""
        found = super().pieces(moved)
        if self._said:
            found[-1]["session"] = self._said
        return found


class Sessions:
    """The routes of one gateway."""

    def __init__(
        self,
        settings: Settings,
        *,
        bus: Bus,
        store: SessionStore,
        claims: Claims,
        desk: Desk,
        fleet: Fleet,
        planner: Callable[[], Planner],
        metrics: Metrics,
        replica: str,
    ) -> None:
        self._settings, self._bus, self._store, self._claims = settings, bus, store, claims
        self._desk, self._fleet, self._planner = desk, fleet, planner
        self._rooms = Rooms(store, settings.gateway.tenants)
        mine = settings.gateway.sessions
        self._limits = Limits(nodes=2 * mine.max_turns, tokens=mine.max_tokens)
        self.finisher = Finisher(
            settings, bus=bus, store=store, claims=claims, tree=self._session, metrics=metrics, replica=replica
        )
        self._mismatches = metrics.counter("session_mismatches_total", "histories that differed from what was said", ["kind"])

    def routes(
        self,
        at: At,
        serve: Serve,
        admitted: Callable[[str], AbstractContextManager[None]],
    ) -> list[Route]:
        """`at` makes a route of a handler, `serve` runs a job, `admitted` holds the tenant's place while a request runs."""

        def brief(path: str, handle: Handle, method: str) -> Route:
            async def answer(request: Request, tenant: str) -> Response:
                with admitted(tenant):
                    return await handle(request, tenant)

            return at(path, answer, method)

        async def chat(request: Request, tenant: str) -> Response:
            return await serve(request, tenant, lambda data: self._begin(request, tenant, data))

        return [
            brief("/tasks/claim", self._claim, "POST"),
            brief("/sessions", self._open, "POST"),
            brief("/sessions/{session}", self._tell, "GET"),
            brief("/sessions/{session}", self._delete, "DELETE"),
            brief("/sessions/{session}/rollback", self._rollback, "POST"),
            brief("/sessions/{session}/finish", self._finish, "POST"),
            at(CHAT, chat, "POST"),
        ]

    async def _open(self, request: Request, tenant: str) -> Response:
        body = parse(SessionBody, await self._body(request))
        seconds = LONGEST_SECONDS if body.ttl_seconds is None else body.ttl_seconds
        if seconds > LONGEST_SECONDS:
            raise invalid(f"ttl_seconds: {seconds:g} is over {LONGEST_SECONDS:g}, the longest that a session stands unchanged")
        # Where this model can have no sessions, its first turn is too late to say so.
        await asyncio.to_thread(self._planner().boundary, body.chat_template_kwargs)
        content = Content(created=time.time(), variables=body.chat_template_kwargs, tools=body.tools)
        async with self._rooms.room(tenant):
            held = await self._store.create(tenant, content, seconds)
        return JSONResponse({"id": held.id, "expires_at": held.entry.expires_at}, 201)

    async def _begin(self, request: Request, tenant: str, data: bytes) -> tuple[Job, Format, bool]:
        body = parse(SessionChatBody, data)
        constraint = bound_model(body.model, self._settings.run.name, body.constraint)
        held = await self._load(request, tenant, change=True)
        task, first = held.content.task, held.content.sampling
        if task is not None:
            bind(body, task)
            constraint = self._claims.constraint(task, constraint if constraint.target is not None else held.content.constraint)
        elif first is not None:
            if body.temperature not in (None, first.temperature):
                raise invalid(
                    f"temperature: this session samples at {first.temperature:g}, and a trajectory has one; begin another session"
                )
            body.temperature = first.temperature
        planner, tools = self._planner(), held.content.tools if body.tools is None else body.tools

        def prepare() -> tuple[Session, Place, dict[str, int]]:
            session = self._session(held.content)
            before, head = dict(session.mismatches), session.head
            place = session.place([message.plain() for message in body.messages], tools)
            if task is not None:
                left_of(session, place, head, task, body, self._settings.rollout.max_context_tokens)
            return session, place, before

        session, place, before = await asyncio.to_thread(prepare)
        if not place.prompt:
            raise invalid("messages: the chat template made an empty prompt of them")
        prompt = list(place.prompt)
        _, job = await self._desk.job(
            request, tenant=tenant, route=CHAT.format(session=held.id), body=data, prefix="chatcmpl-",
            make=lambda: planner.turn(body, prompt, constraint, held.id, tools),
        )  # fmt: skip
        if job.choices[0].ask.prompt != prompt:
            raise conflict("the session has changed since this Idempotency-Key was used first: send the turn under a new key")

        async def keep(done: Job) -> dict[str, Any]:
            (choice,) = done.choices
            message = form.message(choice) | planner.otherwise(choice.text, tools)
            said = await self._keep(held, session, place, done, message)
            for kind, count in session.mismatches.items():
                self._mismatches.labels(kind).inc(count - before.get(kind, 0))
            return said

        form = TurnFormat(body, job, self._fleet, planner.calls(tools), keep)
        return job, form, body.stream

    async def _keep(self, held: Held, session: Session, place: Place, job: Job, message: dict[str, Any]) -> dict[str, Any]:
        (choice,) = job.choices
        sample, finish = choice.sample, choice.finish
        if finish != "stop" and finish != "length":
            raise ApiError(
                409, "superseded", "the replicas left the version that the turn asked for: nothing of it is kept, send it again"
            )

        def record() -> tuple[int, bytes]:
            node = _again(session, place, sample.tokens, sample.logprobs)
            if node is None:
                node = session.said(place, sample.tokens, sample.logprobs, sample.spans, finish, message)
            session.head = node
            return node, encode_session(session)

        faults.point("gateway.turn_sampled")
        node, data = await asyncio.to_thread(record)
        changed = msgspec.structs.replace(held.content, session=data, sampling=choice.ask.sampling, seed=choice.ask.seed)
        if changed.claim is not None:
            changed = msgspec.structs.replace(changed, claim=msgspec.structs.replace(changed.claim, began_on=_began_on(session)))
        await self._store.save(held, changed)
        faults.point("gateway.turn_kept")
        return {"id": held.id, "node": node, "turns": _turns(session), "mismatches": dict(session.mismatches)}

    async def _tell(self, request: Request, tenant: str) -> Response:
        held = await self._load(request, tenant)

        def view() -> dict[str, Any]:
            session = self._session(held.content)
            nodes = [
                {
                    "node": number, "parent": node.parent, "kind": node.kind, "tokens": node.tokens, "logprobs": node.logprobs,
                    "spans": [[span.start, span.end, span.version, span.cut] for span in node.spans],
                    "messages": [told(message) for message in node.messages], "finish_reason": node.finish or None,
                }
                for number, node in enumerate(session.nodes)
            ]  # fmt: skip
            return {
                "id": held.id, "state": held.content.state, "created": held.content.created,
                "expires_at": held.entry.expires_at, "family": session.boundary.family, "head": session.head,
                "path": session.path(), "turns": _turns(session), "tokens": session.tokens(), "nodes": nodes,
                "mismatches": dict(session.mismatches), **task_of(held),
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
        held = await self._load(request, tenant)
        if held.content.claim is not None and held.content.state == "finishing":
            raise conflict(f"session {held.id} is being finished: it can't be deleted now")
        if held.content.claim is not None and held.content.state == "open":
            held = await self._claims.end(held, End(stage="abandoned", reason="its client deleted it"))
        await self._store.delete(held)
        return JSONResponse({"id": request.path_params["session"], "deleted": True})

    async def _claim(self, request: Request, tenant: str) -> Response:
        """201 with the session and its task; 204 where there is none to be had."""
        data = await self._body(request) or b"{}"
        body, named = parse(ClaimBody, data), request.headers.get("idempotency-key")
        if not self._claims.open:
            raise ApiError(404, "no_session_lane", "this run has no tasks to claim: buffer.session_groups is 0")
        planner = self._planner()
        await asyncio.to_thread(planner.boundary, body.chat_template_kwargs)
        key = None if named is None else await ClaimKey.read(self._bus, tenant, named, data)
        held = None if key is None else await self._claims.known(tenant, key)
        if held is None:
            async with self._rooms.room(tenant):
                waits = wait_seconds(request, self._settings.gateway.max_wait_seconds)
                held = await self._claims.claim(tenant, body, waits, key, request.is_disconnected)
        if held is None:
            return Response(status_code=204, headers={"Retry-After": "1"})
        return JSONResponse(await asyncio.to_thread(claimed, held, planner, self._settings), 201)

    async def _finish(self, request: Request, tenant: str) -> Response:
        body = parse(FinishBody, await self._body(request) or b"{}")
        if body.reward is not None:
            self._may_judge(tenant)
        held = await self._load(request, tenant)
        content = held.content
        if content.task is None:
            name = f"{tenant}/{body.group or held.id}"
            sample, size, reference = body.sample, body.group_size, body.reference
        elif said := body.model_fields_set & {"group", "sample", "group_size", "reference"}:
            raise invalid(f"{sorted(said)[0]}: a claimed session is the sample of its task; leave it out")
        else:
            name, sample, size, reference = f"{tenant}/", content.task.sample, content.task.group_size, {}
        wanted = Finish(
            name=name, sample=sample, group_size=size, reference=reference, at=time.time(), node=body.node, reward=body.reward,
            components=body.components,
        )  # fmt: skip
        return JSONResponse(await self.finisher.finish(held, wanted))

    def _may_judge(self, tenant: str) -> None:
        own = self._settings.gateway.tenants.get(tenant)
        if not self._settings.gateway.sessions.client_rewards or (own is not None and not own.may_reward):
            raise ApiError(
                403, "permission_error",
                "reward: the run's reward function judges its samples (gateway.sessions.client_rewards, tenants.NAME.may_reward)",
            )  # fmt: skip

    # Common to them

    async def _load(self, request: Request, tenant: str, *, change: bool = False) -> Held:
        held = await self._store.load(request.path_params["session"], tenant)
        if change and held.content.state != "open":
            why = "" if held.content.end is None else f" ({held.content.end.reason})"
            raise conflict(f"session {held.id} is {held.content.state}{why}: begin another one")
        if change:
            await self._claims.check(held)
        return held

    def _session(self, content: Content) -> Session:
        boundary = self._planner().boundary(content.variables)
        return decode_session(content.session, boundary, self._limits) if content.session else Session(boundary, self._limits)

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._settings.gateway.max_body_bytes)


def _began_on(session: Session) -> int | None:
    """The version of the head's path's first policy token."""
    return next((node.spans[0].version for node in map(session.nodes.__getitem__, session.path()) if node.spans), None)


def _turns(session: Session) -> int:
    return sum(session.nodes[number].kind == "policy" for number in session.path())


def _again(session: Session, place: Place, tokens: list[int], logprobs: list[float]) -> int | None:
    """The node that says this there already: the repeat of a turn whose answer was lost adds nothing."""
    for number, node in enumerate(session.nodes):
        same = node.parent == place.node and node.kind == "policy" and node.tokens == tuple(tokens)
        if same and all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(node.logprobs, logprobs, strict=True)):
            return number
    return None
