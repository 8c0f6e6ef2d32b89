"""Lane session as one gateway pulls it: one pull for all claims that wait, so that none waits behind another's."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import NoReturn

import structlog

from towline.bus.client import Bus, Consumer, Delivery
from towline.contract.task import SESSION
from towline.errors import UnavailableError

PULL_SECONDS = 0.25
"""How long one pull waits for a first task; claims that came meanwhile are in the next one."""
MOST_AT_A_TIME = 64
_RETRY_SECONDS = 1.0
_log = structlog.get_logger("towline.gateway")


class Lane:
    """`run` it; `take` gives each claim a task of its own. Nothing is pulled where no claim waits."""

    def __init__(self, bus: Bus, most_claims: int, ack_wait_seconds: float) -> None:
        self._bus, self._most, self._ack_wait_seconds = bus, most_claims, ack_wait_seconds
        self._waiting: deque[asyncio.Future[Delivery]] = deque()
        self._wanted = asyncio.Event()
        self._away = "lane session isn't read yet"
        """Why nothing can be pulled; empty while it can."""
        self._closed = ""

    async def take(self, seconds: float) -> Delivery | None:
        """The next task, for this caller alone; None where none came in time. `UnavailableError` while the bus is away, and once
        the lane is closed."""
        if self._closed:
            raise UnavailableError(self._closed, code="lane_closed")
        mine: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        self._wanted.set()
        taken = False
        try:
            # What is there already may take a pull to come.
            async with asyncio.timeout(max(seconds, 2 * PULL_SECONDS)):
                delivery = await mine
                taken = True
                return delivery
        except TimeoutError:
            if self._away:
                raise UnavailableError(self._away, code="lane_away") from None
            return None
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(mine)
            if mine.done() and not mine.cancelled() and mine.exception() is None and not taken:
                await mine.result().nak()  # it came in the moment in which its taker gave up

    def close(self, why: str) -> None:
        """Give no more tasks; who waits hears why at once."""
        self._closed = why
        while (taker := self._next()) is not None:
            taker.set_exception(UnavailableError(why, code="lane_closed"))

    @property
    def closed(self) -> str:
        return self._closed

    async def run(self) -> NoReturn:
        consumer: Consumer | None = None
        while True:
            try:
                if consumer is None:
                    consumer = await self._consumer()
                await self._pull(consumer)
                self._away = ""
            except UnavailableError as error:
                self._away = error.message
                _log.warning("claims_wait", reason=error.message)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _consumer(self) -> Consumer:
        spec = self._bus.topology.lane_consumer(SESSION, (self._most + 1) // 2, ack_wait_seconds=self._ack_wait_seconds)
        consumer = await self._bus.consumer(spec)
        await consumer.update(max_ack_pending=self._most, ack_wait_seconds=self._ack_wait_seconds)
        return consumer

    async def _pull(self, consumer: Consumer) -> None:
        if not self._waiting:
            self._wanted.clear()
            await self._wanted.wait()
        for delivery in await consumer.fetch(min(len(self._waiting), MOST_AT_A_TIME) or 1, PULL_SECONDS):
            taker = self._next()
            if taker is None:
                await delivery.nak()  # every claim that waited has gone
            else:
                taker.set_result(delivery)

    def _next(self) -> asyncio.Future[Delivery] | None:
        while self._waiting:
            taker = self._waiting.popleft()
            if not taker.done():
                return taker
        return None
