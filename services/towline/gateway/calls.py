"""A gateway's side of the doors: a request goes to one replica over the bus, and its numbered chunks come back to one inbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import structlog
from nats.aio.msg import Msg

from towline.bus.client import Bus
from towline.bus.connection import Subscription
from towline.bus.wire import NO_RESPONDERS
from towline.contract.codec import encode
from towline.contract.serve import RefusalCode, ServeAnswer, ServeCancel, ServeChunk, ServeRefusal, ServeRequest, decode_answer
from towline.errors import MalformedError, UnavailableError

_log = structlog.get_logger("towline.gateway")


class Refused(Exception):
    """The door doesn't take the request."""

    def __init__(self, refusal: ServeRefusal) -> None:
        super().__init__(refusal.message)
        self.code: RefusalCode = refusal.code
        self.applied, self.message = refusal.applied, refusal.message


class Gone(Exception):
    """The replica is dead to this request: nobody listens there, a chunk is missing, or it has been silent for too long."""


class Calls:
    """`start` it once; `call` as often as needed."""

    def __init__(self, bus: Bus, chunk_seconds: float) -> None:
        self._bus, self._chunk_seconds = bus, chunk_seconds
        self._inbox = bus.connection.new_inbox()
        self._open: dict[str, asyncio.Queue[Msg]] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.connection.subscribe(f"{self._inbox}.*", self._on_message)

    async def close(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()

    async def call(
        self, replica: str, request: ServeRequest, headers: dict[str, str] | None = None
    ) -> AsyncGenerator[ServeChunk, None]:
        """The answer's chunks; the one with `finish` is the last. `Refused`, or `Gone`. Whoever stops early closes it, which
        takes the request back."""
        arrived: asyncio.Queue[Msg] = asyncio.Queue()
        self._open[request.id] = arrived
        over = False
        try:
            await self._bus.connection.send(
                self._bus.topology.serve(replica), encode(request), reply=f"{self._inbox}.{request.id}", headers=headers
            )
            expected = 0
            while True:
                answer = await self._next(arrived, replica)
                if isinstance(answer, ServeRefusal):
                    over = True
                    raise Refused(answer)
                if answer.number == expected - 1 and answer.finish is None:
                    continue  # a sign of life
                if answer.number != expected:
                    raise Gone(f"replica {replica}: chunk {answer.number} came where {expected} was due")
                expected += 1
                over = answer.finish is not None
                yield answer
                if over:
                    return
        except UnavailableError as error:
            raise Gone(f"replica {replica}: {error.message}") from error
        finally:
            del self._open[request.id]
            if not over:
                await self._cancel(replica, request.id)

    async def _next(self, arrived: asyncio.Queue[Msg], replica: str) -> ServeAnswer:
        try:
            async with asyncio.timeout(self._chunk_seconds):
                message = await arrived.get()
        except TimeoutError:
            raise Gone(f"replica {replica}: silent for {self._chunk_seconds:g} s") from None
        if (message.headers or {}).get("Status") == NO_RESPONDERS:
            raise Gone(f"replica {replica}: nobody listens there")
        try:
            return decode_answer(message.data)
        except MalformedError as error:
            raise Gone(f"replica {replica}: {error.message}") from error

    async def _cancel(self, replica: str, request_id: str) -> None:
        try:
            await self._bus.connection.send(f"{self._bus.topology.serve(replica)}.cancel", encode(ServeCancel(id=request_id)))
        except UnavailableError as error:
            _log.info("cancel_unsent", request=request_id, reason=error.message)

    def _on_message(self, message: Msg) -> None:
        arrived = self._open.get(message.subject.rpartition(".")[2])
        if arrived is not None:
            arrived.put_nowait(message)
