"""The publisher without the service around it: staged records in, LOG entries and hints out, anchors behind them.

A staged record is acknowledged after its verdict was published, so a crash at any point brings it back; what was decided stands
in the LOG by then, and is only said again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Literal

import structlog

from towline import faults, spans
from towline.bus.client import Bus, Consumer, Delivery
from towline.bus.topology import IN_PROGRESS_SHARE, PUBLISHER_ACK_WAIT_SECONDS
from towline.config import Settings
from towline.contract.codec import encode
from towline.contract.policy import Committed, Refused, Staged, decode_policy
from towline.errors import CorruptError, MalformedError, MissingError, TowlineError, UnavailableError
from towline.publisher.anchoring import Anchorer
from towline.publisher.core import PublisherCore
from towline.runtime.run_end import run_has_ended
from towline.store.objects import ObjectStore

Tell = Callable[[str | None], None]
RETRY_SECONDS = 1.0
END_POLL_SECONDS = 1.0
LAST_ANCHOR_SECONDS = 60.0
"""What an anchor that is on its way may still take when the run is over."""
_log = structlog.get_logger("towline.publisher")


class Publishing:
    """`tell` hears the named state that the publisher isn't ready in, or None."""

    def __init__(self, settings: Settings, bus: Bus, objects: ObjectStore, tell: Tell) -> None:
        self.core = PublisherCore(objects, settings.run.name, settings.publisher)
        self._anchorer = Anchorer(objects, self.core, settings.publisher.anchor_every)
        self._settings = settings
        self._bus = bus
        self._tell = tell
        self._anchor: asyncio.Future[None] | None = None
        self._asked_at = 0.0

    def figures(self) -> dict[str, object]:
        """For the status."""
        return asdict(self.core.figures) | {"anchors": self._anchorer.written}

    async def run(self, draining: asyncio.Event) -> Literal["ended", "drained"]:
        """Until the run is over or `draining` is set. A store or a bus that is away is waited for, and told."""
        consumer: Consumer | None = None
        while not draining.is_set():
            try:
                reason = await asyncio.to_thread(self.core.follow)
                self._tell(reason)
                if reason in ("log_empty", "no_epoch"):
                    await _pause(draining, self._settings.publisher.poll_seconds)
                    continue
                consumer = consumer or await self._bus.consumer(self._bus.topology.publisher_consumer())
                await self._serve(consumer, draining)
            except (UnavailableError, MissingError, CorruptError) as error:
                self._report(error)
                await _pause(draining, RETRY_SECONDS)
                continue
            if not draining.is_set() and await self._over_and_done():
                break
        if consumer is not None:
            await consumer.close()
        return "drained" if draining.is_set() else "ended"

    async def _serve(self, consumer: Consumer, draining: asyncio.Event) -> None:
        """Handle what is staged until nothing is for `poll_seconds`."""
        while not draining.is_set():
            deliveries = await consumer.fetch(1, self._settings.publisher.poll_seconds)
            if not deliveries:
                return
            await self._handle(deliveries[0])

    async def _handle(self, delivery: Delivery) -> None:
        with spans.follow("version.publish", delivery.headers) as span:
            if span:
                span.set(delivery=delivery.num_delivered)
            await self._decide(delivery)

    async def _decide(self, delivery: Delivery) -> None:
        faults.point("publisher.received")
        try:
            staged = decode_policy(delivery.data)
            if not isinstance(staged, Staged):
                raise MalformedError(f"policy.staged holds {type(staged).__name__}", data=delivery.data)
        except MalformedError as error:
            await self._bus.dead("publisher", delivery.data, error.message, sequence=delivery.sequence)
            await delivery.ack()
            return
        try:
            async with _in_progress(delivery):
                verdict = await asyncio.to_thread(self.core.decide, staged)
        except (UnavailableError, MissingError, CorruptError):
            await delivery.nak(RETRY_SECONDS)
            raise
        await self._publish(verdict)
        faults.point("publisher.published")
        await delivery.ack()
        faults.point("publisher.acknowledged")
        await self._maybe_anchor()

    async def _publish(self, verdict: Committed | Refused) -> None:
        if isinstance(verdict, Committed):
            with contextlib.suppress(UnavailableError):  # head.json is a hint: without it readers probe
                await asyncio.to_thread(self.core.log.write_hint, self._anchorer.known)
            faults.point("publisher.hinted")
        kind = "committed" if isinstance(verdict, Committed) else "refused"
        committed = spans.current.get() if isinstance(verdict, Committed) else None
        headers = None if committed is None else spans.fixed_context(committed.trace_id, spans.COMMIT).headers
        await self._bus.publish(self._bus.topology.policy(kind), encode(verdict), headers=headers)

    async def _maybe_anchor(self) -> None:
        if self._anchor is not None and not self._anchor.done():
            return
        due = await asyncio.to_thread(self._anchorer.due)
        if due is not None:
            self._anchor = _beside(lambda: self._anchorer.write(*due))
            self._anchor.add_done_callback(_report_anchor)

    async def _is_over(self) -> bool:
        now = time.monotonic()
        if now - self._asked_at < END_POLL_SECONDS:
            return False
        self._asked_at = now
        return await run_has_ended(self._bus, self._settings.run.steps)

    async def _over_and_done(self) -> bool:
        """Whether the run is over; an anchor that is on its way is waited for."""
        try:
            if not await self._is_over():
                return False
        except UnavailableError as error:
            self._report(error)
            return False
        if self._anchor is not None and not self._anchor.done():
            await asyncio.wait([self._anchor], timeout=LAST_ANCHOR_SECONDS)
        return True

    def _report(self, error: TowlineError) -> None:
        """Of the states that pass by themselves, by their codes: bus_full, store_unavailable, …; or the base can't be read."""
        state = error.code if isinstance(error, UnavailableError) else "base_unreadable"
        self._tell(state)
        _log.warning("waiting", state=state, code=error.code, reason=error.message)


@contextlib.asynccontextmanager
async def _in_progress(delivery: Delivery) -> AsyncIterator[None]:
    """The bus doesn't give the record to another publisher meanwhile."""

    async def say_so() -> None:
        while True:
            await asyncio.sleep(PUBLISHER_ACK_WAIT_SECONDS * IN_PROGRESS_SHARE)
            await delivery.in_progress()

    task = asyncio.create_task(say_so(), name="publisher-in-progress")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _beside(work: Callable[[], None]) -> asyncio.Future[None]:
    """The work in a thread that doesn't hold up the process's end: an anchor may be left half-written at any time."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001  it is handed on
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="towline-anchor", daemon=True).start()
    return future


def _report_anchor(future: asyncio.Future[None]) -> None:
    """One that failed is tried again at the next commit: anchors only shorten chains."""
    if not future.cancelled() and (error := future.exception()) is not None:
        _log.warning("anchor_failed", reason=str(error))


async def _pause(draining: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await draining.wait()
