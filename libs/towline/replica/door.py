"""A replica's door: requests from gateways, served on the engine's own slots by a version that they accept, and no other.

The version that the replica advertises decides at admission, the version of each span afterwards: not one token of another one
leaves here, nor one of a version that the engine hasn't proved. docs/design/060-gateway.md.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog
from nats.aio.msg import Msg

from towline import spans
from towline.bus.client import Bus
from towline.bus.wire import NO_RESPONDERS
from towline.config import GatewaySettings
from towline.contract.codec import encode
from towline.contract.serve import (
    RefusalCode,
    ServeChunk,
    ServeFinish,
    ServeRefusal,
    ServeRequest,
    clip_spans,
    decode_cancel,
    decode_request,
    pack_logprobs,
)
from towline.contract.task import VersionSpan, pack_tokens
from towline.engine.base import Engine, Generation, Progress
from towline.errors import EngineError, MalformedError, UnavailableError, UsageError
from towline.replica.guest import Guest, accepts, contradiction, engine_id, engine_request, misfit
from towline.replica.replica import Replica

SIGNS_OF_LIFE = 3
"""In gateway.chunk_seconds: two may be lost in a row."""
_log = structlog.get_logger(__name__)


class Door:
    """`run` it beside the replica; tell it by `review` when the version or the LOG changed, by `let_in` when a slot came free.

    `others` is how many slots everything else takes; `freed` is called when a request's slot comes free.
    """

    def __init__(
        self,
        *,
        bus: Bus,
        engine: Engine,
        replica: Replica,
        settings: GatewaySettings,
        others: Callable[[], int],
        freed: Callable[[], None],
    ) -> None:
        self._bus, self._engine, self._replica, self._settings = bus, engine, replica, settings
        self._others, self._freed = others, freed
        self._guests: dict[str, Guest] = {}
        self._running = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._newer_since: tuple[int, float] | None = None
        self._held: tuple[int, float | None] | None = None
        self.served = 0
        self.tokens = 0
        self.superseded = 0
        self.handed_over = 0
        self.refused: dict[str, int] = {}

    @property
    def busy(self) -> int:
        """Slots that requests take."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue)

    @property
    def taken(self) -> int:
        """Slots that tasks must leave alone."""
        return max(self._running, min(self._settings.reserved_slots, self._engine.slots - 1))

    def report(self) -> dict[str, int | dict[str, int]]:
        """Numbers for the status: what there is now, and totals since the start."""
        return {
            "running": self._running, "waiting": self.waiting, "served": self.served, "tokens": self.tokens,
            "superseded": self.superseded, "handed_over": self.handed_over, "refused": sum(self.refused.values()),
            "refusals": dict(self.refused),
        }  # fmt: skip

    async def run(self) -> None:
        subject = self._bus.topology.serve(self._replica.name)
        subscriptions = [
            await self._bus.connection.subscribe(subject, self._on_request),
            await self._bus.connection.subscribe(f"{subject}.cancel", self._on_cancel),
        ]
        try:
            while True:
                await asyncio.sleep(self._settings.chunk_seconds / SIGNS_OF_LIFE)
                for guest in list(self._guests.values()):
                    await self._show_life(guest)
        finally:
            for task in self._tasks:
                task.cancel()
            for subscription in subscriptions:
                await subscription.close()

    def close(self) -> None:
        """Take nothing more; what runs is handed over with all that it has, so that it goes on elsewhere."""
        self._closing = True
        for guest in list(self._guests.values()):
            self._end(guest, "handed_over")

    async def settled(self, seconds: float) -> None:
        """After `close`: until every request has had its last chunk."""
        if self._closing and self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    def review(self) -> None:
        """The served version or the LOG changed: hold the one or end what the new one may not serve."""
        version, lineage = self._replica.version, self._replica.lineage
        if version is not None and lineage.latest != version:
            if self._newer_since is None or self._newer_since[0] != version:
                self._newer_since = (version, time.monotonic())
        else:
            self._newer_since = None
        self._hold()
        for guest in list(self._guests.values()):
            guest.news.set()

    def let_in(self) -> None:
        """Slots may have come free: whoever waits longest goes first."""
        limit = self._settings.most_slots or self._engine.slots
        while self._queue and self._running < limit and self._running + self._others() < self._engine.slots:
            turn = self._queue.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)

    # What comes in

    def _on_request(self, message: Msg) -> None:
        task = asyncio.create_task(self._serve(message))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("serving_broke", exc_info=error)

    def _on_cancel(self, message: Msg) -> None:
        try:
            guest = self._guests.get(decode_cancel(message.data).id)
        except MalformedError as error:
            _log.warning("cancel_unreadable", reason=error.message)
            return
        if guest is not None:
            self._end(guest, "cancelled")

    async def _serve(self, message: Msg) -> None:
        try:
            request = decode_request(message.data)
            prompt = request.prompt
        except MalformedError as error:
            await self._refuse(message.reply, "", "invalid", error.message)
            return
        if (refusal := self._refusal(request, prompt)) is not None:
            await self._refuse(message.reply, request.id, *refusal)
            return
        guest = self._guests[request.id] = Guest(request, message.reply)
        with spans.follow("door", message.headers, "server") as span:
            await self._attend(guest, request, prompt)
            if span:
                span.set(replica=self._replica.name, request=request.id, tokens=guest.sent, ended_early=guest.why)

    async def _attend(self, guest: Guest, request: ServeRequest, prompt: list[int]) -> None:
        entered = False
        try:
            await self._send(guest, ServeChunk(id=request.id, number=0, busy=self._load(), applied=self._replica.version))
            await self._turn(guest)
            entered = guest.why is None
            if not entered:
                await self._last(guest, [], [], (), guest.why or "cancelled")
            elif (refusal := self._refusal(request, prompt, standing=True)) is not None:
                await self._refuse(guest.reply, request.id, *refusal)
            else:
                with spans.child("engine.generate", "client"):
                    await self._generate(guest, prompt)
        except UnavailableError as error:
            _log.warning("answer_lost", request=request.id, reason=error.message)
        finally:
            del self._guests[request.id]
            if guest.heard is not None:
                guest.heard.cancel()
            if guest.begun:
                self._running -= 1
                self.let_in()
                self._freed()
            self._hold()

    def _refusal(self, request: ServeRequest, prompt: list[int], *, standing: bool = False) -> tuple[RefusalCode, str] | None:
        """Why the request isn't taken; None where it is. `standing`: it has waited here already."""
        name, version = self._replica.name, self._replica.version
        if self._closing or self._replica.states.state == "draining":
            return "draining", f"replica {name} stops"
        if (wrong := contradiction(request)) is not None:
            return "invalid", wrong
        if version is None or not self._accepts(request, version) or not self._accepts_live(request, version):
            return "not_ready", f"replica {name} serves {'no version' if version is None else f'version {version}'}"
        if not standing:
            if request.id in self._guests:
                return "invalid", f"request {request.id} runs already"
            if len(self._queue) >= self._settings.waiting:
                return "busy", f"{len(self._queue)} requests wait at replica {name} already"
            if (wrong := misfit(request, prompt, self._engine.max_context)) is not None:
                return "invalid", wrong
        return None

    def _accepts_live(self, request: ServeRequest, advertised: int) -> bool:
        """While a version is being proved the engine serves it already: an exact request would be cut at once."""
        live = self._engine.version
        return live == advertised or live is None or self._accepts(request, live)

    def _accepts(self, request: ServeRequest, version: int) -> bool:
        return accepts(self._replica.lineage, request, version)

    async def _refuse(self, reply: str, request_id: str, code: RefusalCode, message: str) -> None:
        self.refused[code] = self.refused.get(code, 0) + 1
        if reply:
            refusal = ServeRefusal(id=request_id, code=code, applied=self._replica.version, message=message)
            await self._bus.connection.send(reply, encode(refusal))

    async def _turn(self, guest: Guest) -> None:
        """Wait for a slot, or for the request's end."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self.let_in()
        while not turn.done() and guest.why is None:
            news = asyncio.create_task(guest.news.wait())
            either: list[asyncio.Future[Any]] = [turn, news]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            guest.news.clear()
            if not turn.done() and self._replica.version is not None:
                version = self._replica.version
                if not self._accepts(guest.request, version) and guest.request.exact_version is not None:
                    guest.why = "superseded"
        guest.begun = turn.done()
        if not turn.done():
            turn.cancel()
            self._queue.remove(turn)

    # A request's life

    async def _generate(self, guest: Guest, prompt: list[int]) -> None:
        request = guest.request

        def progressed(progress: Progress) -> None:
            guest.latest = progress
            guest.news.set()

        self._hold()
        generating = asyncio.create_task(
            self._engine.generate(engine_request(request, prompt, progressed)), name=f"serve-{request.id}"
        )
        generating.add_done_callback(lambda _: guest.news.set())
        try:
            while not generating.done():
                await guest.news.wait()
                guest.news.clear()
                if guest.why is not None or generating.done():
                    break
                if guest.latest is not None:
                    await self._pass_on(guest, guest.latest)
            if guest.why is not None:
                self._engine.abort(engine_id(request))
            await self._close(guest, await generating)
        except UsageError as error:
            await self._refuse(guest.reply, request.id, "invalid", error.message)
        except EngineError as error:
            await self._last(guest, [], [], (), "failed", error.message)
        finally:
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)

    async def _pass_on(self, guest: Guest, progress: Progress) -> None:
        """A chunk of what is new, as far as its versions are accepted and proved."""
        end, why = await self._fit(guest, progress.spans, len(progress.tokens))
        if end > guest.sent:
            guest.number += 1
            await self._send(guest, self._chunk(guest, progress.tokens, progress.logprobs, progress.spans, end))
        if why is not None:
            self._end(guest, why)

    async def _close(self, guest: Guest, generation: Generation) -> None:
        end, why = await self._fit(guest, generation.spans, len(generation.tokens))
        finish: ServeFinish
        if why is not None:
            finish = why
        elif generation.finish == "abort":
            finish = guest.why or "handed_over"
        else:
            finish = generation.finish
        tokens = generation.tokens[guest.sent : end]
        await self._last(
            guest, tokens, generation.logprobs[guest.sent : end], clip_spans(generation.spans, guest.sent, end), finish
        )

    async def _fit(self, guest: Guest, spans: list[VersionSpan], count: int) -> tuple[int, ServeFinish | None]:
        """How many of the tokens may leave, and why not all of them."""
        for span in spans:
            if span.end <= guest.sent:
                continue
            if not self._accepts(guest.request, span.version):
                return span.start, "superseded"
            if not await self._replica.vouched([span.version]):
                return span.start, "failed"
        return count, None

    def _chunk(self, guest: Guest, tokens: list[int], logprobs: list[float], spans: list[VersionSpan], end: int) -> ServeChunk:
        start, guest.sent = guest.sent, end
        self.tokens += end - start
        return ServeChunk(
            id=guest.request.id, number=guest.number, tokens=pack_tokens(tokens[start:end]), busy=self._load(),
            logprobs=pack_logprobs(logprobs[start:end]), spans=clip_spans(spans, start, end), applied=self._replica.version,
        )  # fmt: skip

    async def _last(
        self,
        guest: Guest,
        tokens: list[int],
        logprobs: list[float],
        spans: tuple[VersionSpan, ...],
        finish: ServeFinish,
        reason: str = "",
    ) -> None:
        guest.number += 1
        guest.sent += len(tokens)
        self.tokens += len(tokens)
        self.served += finish in ("stop", "length")
        self.superseded += finish == "superseded"
        self.handed_over += finish == "handed_over"
        await self._send(
            guest,
            ServeChunk(
                id=guest.request.id, number=guest.number, tokens=pack_tokens(tokens), logprobs=pack_logprobs(logprobs),
                spans=spans, finish=finish, reason=reason, applied=self._replica.version, busy=self._load(),
            ),
        )  # fmt: skip

    def _end(self, guest: Guest, why: ServeFinish) -> None:
        if guest.why is None:
            guest.why = why
            guest.news.set()

    # Who listens, and what is held

    async def _send(self, guest: Guest, chunk: ServeChunk) -> None:
        await self._bus.connection.send(guest.reply, encode(chunk))

    async def _show_life(self, guest: Guest) -> None:
        """Repeat the last number; end the request whose gateway nobody sees any more."""
        if guest.heard is not None and guest.heard.done() and not guest.heard.cancelled() and guest.heard.exception() is None:
            headers = guest.heard.result().headers or {}
            if headers.get("Status") == NO_RESPONDERS:
                self._end(guest, "cancelled")
                return
        if guest.heard is not None:
            guest.heard.cancel()
        sign = ServeChunk(id=guest.request.id, number=guest.number, busy=self._load(), applied=self._replica.version)
        try:
            guest.heard = await self._bus.connection.post(guest.reply, encode(sign))
        except UnavailableError as error:
            _log.warning("sign_of_life_lost", request=guest.request.id, reason=error.message)

    def _load(self) -> int:
        return self._running + self._others() + len(self._queue)

    def _hold(self) -> None:
        """A newer version stands, and requests of exactly the served one run: it's put off, for a while since it was seen."""
        version = self._replica.version
        if version is None:
            return
        exact = any(guest.begun and guest.request.exact_version == version for guest in self._guests.values())
        since = self._newer_since[1] if exact and self._newer_since is not None else None
        until = None if since is None else since + self._settings.exact_hold_seconds
        if (version, until) != self._held:
            self._held = (version, until)
            self._replica.hold(version, until)
