"""A durable pull consumer that many readers share: each message goes to one of them, and again to another if it isn't acked.

A fetch never holds more than was asked for, so that a worker with one free slot takes one task. Acks are flow control, never
truth: a lost one means a redelivery, which every reader must bear.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
from nats.aio.msg import Msg

from towline.bus.connection import Connection, Subscription
from towline.bus.jetstream import JetStream
from towline.bus.topology import ConsumerSpec
from towline.bus.wire import NO_RESPONDERS, NOT_FOUND, ApiError, Blobs, Message, Unsettled, fetch, own_headers, place
from towline.errors import CorruptError, MissingError, UnavailableError

GRACE_SECONDS = 1.0
"""What the server's "expired" may take to arrive after the time that was asked for."""
LONGEST_PULL_SECONDS = 5.0
"""A longer fetch pulls again. What a server remembers of a pull it forgets soon, where roles have accounts (access/walls.py)."""
QUIET_SECONDS = 0.05
"""Without a further message for so long, a fetch that has some is done."""
BLOB_TRIES = 5
BLOB_DELAY_SECONDS = 5.0
BLOB_ERROR_HEADER = "Towline-Blob-Error"
_PAUSE_SECONDS = 0.05
_NANOSECONDS = 1_000_000_000
_SHORTEST_NANOSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Delivery(Message):
    """A message to be worked on and then acked. `num_delivered` is 1 at the first time.

    The four answers don't wait and don't fail where the bus is away: the message then comes again.
    """

    num_delivered: int
    _reply: str = field(repr=False)
    _connection: Connection = field(repr=False)

    @property
    def receipt(self) -> str:
        """What `Bus.ack_of` and `Bus.in_progress_of` take, in any process, for as long as the message isn't acked."""
        return self._reply

    async def ack(self) -> None:
        """Done with it."""
        await self._answer(b"+ACK")

    async def nak(self, delay_seconds: float | None = None) -> None:
        """Somebody else's turn, after `delay_seconds`."""
        delay = b"" if delay_seconds is None else b' {"delay": %d}' % int(delay_seconds * _NANOSECONDS)
        await self._answer(b"-NAK" + delay)

    async def in_progress(self) -> None:
        """Still at it: the ack wait starts anew."""
        await self._answer(b"+WPI")

    async def term(self) -> None:
        """Never again, to nobody."""
        await self._answer(b"+TERM")

    async def _answer(self, text: bytes) -> None:
        with contextlib.suppress(Unsettled):
            await self._connection.send(self._reply, text)


@dataclass(slots=True)
class _Pull:
    """What a pull that stands at the server hasn't brought yet. At `until`, by the loop's clock, it's over there, also where the
    word of that was lost on its way: with a server of a cluster, or a leaf's line."""

    missing: int
    until: float


class Consumer:
    """A reader's share of a durable consumer, which is made where it's missing and found where it's there."""

    def __init__(self, jetstream: JetStream, spec: ConsumerSpec, blobs: Blobs | None) -> None:
        self._jetstream = jetstream
        self._connection = jetstream.connection
        self._blobs = blobs
        self.spec = spec
        self._what = f"consumer {spec.durable} of {spec.stream}"
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{spec.stream}.{spec.durable}"
        self._inbox = self._connection.new_inbox()
        self._arrived: deque[Msg] = deque()
        self._wake = asyncio.Event()
        self._subscription: Subscription | None = None
        self._pull_count = 0
        self._open: dict[str, _Pull] = {}
        self._losses = 0
        self._forget = self._connection.on_change(self._on_loss)
        self._turn = asyncio.Lock()

    async def ensure(self) -> None:
        """It's there on return; one that was there keeps its settings."""
        await self._bind()

    async def start(self) -> None:
        if self._subscription is None:
            await self._bind()
            self._subscription = await self._connection.subscribe(f"{self._inbox}.*", self._receive)

    async def close(self) -> None:
        """End this reader's share; the consumer stays."""
        self._forget()
        if self._subscription is not None:
            await self._subscription.close()
            self._subscription = None

    async def fetch(self, n: int, timeout_seconds: float) -> list[Delivery]:
        """1 to n messages as soon as there are any; empty after `timeout_seconds`. One fetch at a time; others wait for it.

        `UnavailableError` where the bus stays away for longer than the client's patience.
        """
        async with self._turn:
            clock = asyncio.get_running_loop().time
            deadline = clock() + timeout_seconds
            while True:
                await self._jetstream.patiently(f"fetch from {self._what}", self.start)
                try:
                    taken = await self._pull(n, min(deadline - clock(), LONGEST_PULL_SECONDS))
                except Unsettled as error:
                    if error.no_responders:
                        # Gone: nobody pulled for too long, or the server lost it with its disk.
                        await self._bind()
                    taken = []
                if taken or clock() >= deadline:
                    deliveries = [await self._delivery(message) for message in taken]
                    return [delivery for delivery in deliveries if delivery is not None]
                await asyncio.sleep(_PAUSE_SECONDS)

    async def update(self, *, max_ack_pending: int | None = None, ack_wait_seconds: float | None = None) -> None:
        """Let `max_ack_pending` messages be out unacked, each for `ack_wait_seconds`, from now on; None changes nothing."""
        wanted: dict[str, Any] = {}
        if max_ack_pending is not None:
            wanted["max_ack_pending"] = max_ack_pending
        if ack_wait_seconds is not None:
            wanted["ack_wait"] = int(ack_wait_seconds * _NANOSECONDS)
        info = await self._info()
        if info is None or any(info["config"][key] != value for key, value in wanted.items()):
            await self._create((info["config"] if info else self._config()) | wanted)

    async def pending(self) -> int:
        """Messages that nobody has been given yet."""
        info = await self._info()
        return int(info["num_pending"]) if info else 0

    async def _pull(self, n: int, seconds: float) -> list[Msg]:
        """Up to n messages: those there are, or the first that come within `seconds`.

        A pull with `no_wait` and an expiry ends with its first messages, except where max_ack_pending holds back the rest: it
        then stays open at the server. What is open is counted, and only what is missing to n is asked for.
        """
        taken = self._leftover(n)
        if taken:
            return taken
        clock = asyncio.get_running_loop().time
        for token in [token for token, pull in self._open.items() if pull.until <= clock()]:
            del self._open[token]
        asked = sum(pull.missing for pull in self._open.values())
        give_up = clock() + seconds + GRACE_SECONDS
        if asked < n:
            await self._ask(n - asked, seconds, give_up)
        losses = self._losses
        while len(taken) < n and self._open:
            message = await self._next_arrived(QUIET_SECONDS if taken else give_up, losses, relative=bool(taken))
            if message is None:
                break
            if self._is_delivery(message):
                taken.append(message)
            elif (message.headers or {}).get("Status") == NO_RESPONDERS and not taken:
                raise Unsettled(f"{self._what} isn't there", no_responders=True)
        if not taken:
            self._connection.raise_if_denied(self._next)  # a refused pull is one that nobody answers
        return taken

    async def _ask(self, count: int, seconds: float, until: float) -> None:
        self._pull_count += 1
        request = {"batch": count, "no_wait": True, "expires": max(int(seconds * _NANOSECONDS), _SHORTEST_NANOSECONDS)}
        await self._connection.send(self._next, msgspec.json.encode(request), reply=f"{self._inbox}.{self._pull_count}")
        self._open[str(self._pull_count)] = _Pull(count, until)

    def _is_delivery(self, message: Msg) -> bool:
        """Whether it is a message, not a pull's end; either way what is open is counted down."""
        if not message.reply.startswith("$JS.ACK."):
            self._open.pop(message.subject.rpartition(".")[2], None)
            return False
        for token in self._open:
            self._open[token].missing -= 1
            if not self._open[token].missing:
                del self._open[token]
            break
        return True

    def _leftover(self, n: int) -> list[Msg]:
        """Messages that came after their fetch had given up: they are ours all the same."""
        taken: list[Msg] = []
        while self._arrived and len(taken) < n:
            message = self._arrived.popleft()
            if self._is_delivery(message):
                taken.append(message)
        return taken

    async def _next_arrived(self, until: float, losses: int, *, relative: bool) -> Msg | None:
        clock = asyncio.get_running_loop().time
        give_up = clock() + until if relative else until
        while not self._arrived:
            left = give_up - clock()
            if left <= 0 or self._losses != losses:
                return None
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()
        return self._arrived.popleft()

    async def _delivery(self, message: Msg) -> Delivery | None:
        """The message with its payload. One whose blob can't be had comes again later, and at last with an empty payload, which
        no decoder takes: so it ends as malformed, not as a reader that stops at it for ever."""
        where = place(message.reply)
        headers = own_headers(message.headers)
        try:
            data = await fetch(message.data, headers, self._blobs, message.subject)
        except (UnavailableError, MissingError, CorruptError) as error:
            if where.num_delivered <= BLOB_TRIES:
                delay = b'-NAK {"delay": %d}' % int(BLOB_DELAY_SECONDS * _NANOSECONDS)
                with contextlib.suppress(Unsettled):
                    await self._connection.send(message.reply, delay)
                return None
            data, headers = b"", {**headers, BLOB_ERROR_HEADER: error.message}
        return Delivery(
            message.subject, where.sequence, data, headers, where.at, where.num_delivered, message.reply, self._connection
        )

    def _receive(self, message: Msg) -> None:
        self._arrived.append(message)
        self._wake.set()

    def _on_loss(self) -> None:
        self._losses += 1
        self._open.clear()
        self._wake.set()

    async def _bind(self) -> None:
        """Make the consumer unless it's there; one that is keeps its settings, which others may have updated."""
        if await self._info() is None:
            await self._create(self._config())

    async def _info(self) -> dict[str, Any] | None:
        try:
            return await self._jetstream.call(f"look at {self._what}", f"CONSUMER.INFO.{self.spec.stream}.{self.spec.durable}")
        except ApiError as error:
            if error.code == NOT_FOUND:
                return None
            raise error.translated(f"look at {self._what}") from None

    async def _create(self, config: dict[str, Any]) -> None:
        try:
            await self._jetstream.call(
                f"make {self._what}", f"CONSUMER.CREATE.{self.spec.stream}.{self.spec.durable}",
                {"stream_name": self.spec.stream, "config": config},
            )  # fmt: skip
        except ApiError as error:
            raise error.translated(f"make {self._what}") from None

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "name": self.spec.durable,
            "durable_name": self.spec.durable,
            "filter_subjects": list(self.spec.filters),
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": int(self.spec.ack_wait_seconds * _NANOSECONDS),
            "max_deliver": -1,
            "max_ack_pending": self.spec.max_ack_pending,
        }
        if self.spec.inactive_seconds is not None:
            config["inactive_threshold"] = int(self.spec.inactive_seconds * _NANOSECONDS)
        return config
