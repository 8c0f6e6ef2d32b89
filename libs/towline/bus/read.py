"""Reading a stream in its order, each message once, over lost connections and restarted servers.

An ordered consumer lives in the server's memory and is cheap to lose: after any doubt (a gap, silence, a lost connection)
a new one starts after the last message that the caller has. Messages are pulled, so that a slow caller holds up nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from nats.aio.msg import Msg

from towline.bus.jetstream import JetStream, StreamState
from towline.bus.wire import BLOB_HEADER, ApiError, Blobs, Message, Unsettled, fetch, own_headers, place
from towline.errors import InvariantError, UnavailableError

MOST_MESSAGES = 2048
"""Asked for at a time, fewer where they are large; half of them gone, more are asked for."""
MOST_BYTES = 16 << 20
PULL_SECONDS = 30.0
HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS
CONSUMER_IDLE_SECONDS = 120.0
_NANOSECONDS = 1_000_000_000
_FIRST_GUESS_BYTES = 8192
_HEARTBEAT, _EXPIRED, _CONFLICT = "100", "408", "409"
_LOSING = ("consumer deleted", "leadership change", "server shutdown")
_DELETE_SECONDS = 1.0


class OrderedReader:
    """One reading of a stream; `messages` may be iterated once."""

    def __init__(
        self,
        jetstream: JetStream,
        stream: str,
        blobs: Blobs | None,
        *,
        start: int = 1,
        subjects: Sequence[str] | None = None,
        follow: bool = True,
        last_per_subject: bool = False,
        headers_only: bool = False,
    ) -> None:
        self._jetstream = jetstream
        self._connection = jetstream.connection
        self._stream = stream
        self._blobs = blobs
        self._next = start
        self._subjects = list(subjects or ())
        self._follow = follow
        self._last_per_subject = last_per_subject
        self._headers_only = headers_only
        self._created_at: str | None = None
        self._inbox = self._connection.new_inbox()
        self._arrived: deque[Msg] = deque()
        self._wake = asyncio.Event()
        self._lost = False
        self._consumer = ""
        self._life_count = 0
        self._asked = 0
        self._ask_below = 0
        """More are asked for once no more than so many are on their way."""
        self._mean_bytes = float(_FIRST_GUESS_BYTES)

    async def messages(self) -> AsyncGenerator[Message, None]:
        """Every message from `start` on, in order; where not following, up to the end that the stream had at first.

        `InvariantError` (stream_regressed) where the stream isn't what it was.
        """
        subscription = await self._connection.subscribe(f"{self._inbox}.*", self._receive)
        forget = self._connection.on_change(self._on_loss)
        end: int | None = None
        try:
            while True:
                state = await self._state()
                if not self._follow and end is None:
                    end = state.last_sequence
                if end is not None and self._next > end:
                    return
                if await self._new_consumer() == 0 and end is not None:
                    return
                async for message, pending in self._life():
                    if end is not None and message.sequence > end:
                        return
                    self._next = message.sequence + 1
                    yield message
                    if end is not None and (pending == 0 or self._next > end):
                        return
        finally:
            forget()
            await subscription.close()
            await self._delete_consumer()

    async def _state(self) -> StreamState:
        state = await self._jetstream.stream_state(self._stream)
        if self._created_at is None:
            self._created_at = state.created_at
        if state.created_at != self._created_at or state.last_sequence < self._next - 1:
            raise InvariantError(
                f"stream {self._stream} went backwards: message {self._next - 1} was read, it ends at {state.last_sequence} "
                f"and was created at {state.created_at}; its server lost data, so start a new run or restore it",
                code="stream_regressed",
            )
        return state

    async def _new_consumer(self) -> int:
        """A consumer that begins at the next message; how many it has to bring."""
        self._life_count += 1
        self._arrived.clear()
        self._lost = False
        self._asked = 0
        self._consumer = f"r{secrets.token_hex(8)}"
        config: dict[str, Any] = {
            "name": self._consumer,
            "deliver_policy": "last_per_subject" if self._last_per_subject else "by_start_sequence",
            "ack_policy": "none",
            "max_deliver": 1,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(CONSUMER_IDLE_SECONDS * _NANOSECONDS),
        }
        if not self._last_per_subject:
            config["opt_start_seq"] = max(self._next, 1)
        if self._headers_only:
            config["headers_only"] = True
        if self._subjects:
            config["filter_subjects"] = self._subjects
        body = {"stream_name": self._stream, "config": config}
        try:
            info = await self._jetstream.call(f"read {self._stream}", f"CONSUMER.CREATE.{self._stream}.{self._consumer}", body)
        except ApiError as error:
            raise error.translated(f"read {self._stream}") from None
        return int(info["num_pending"])

    async def _life(self) -> AsyncGenerator[tuple[Message, int]]:
        """What one consumer brings, with how much it had left then; ends at the first doubt."""
        expected = 1
        while True:
            if self._asked <= self._ask_below:
                with contextlib.suppress(Unsettled):
                    await self._ask_for_more()
            arrived = self._arrived.popleft() if self._arrived else await self._next_arrived()
            if arrived is None:
                self._connection.raise_if_denied(self._pull)
                return
            if not arrived.reply.startswith("$JS.ACK."):
                if not self._goes_on(arrived):
                    return
                continue
            where = place(arrived.reply)
            if where.consumer_sequence != expected:
                return
            expected += 1
            self._asked -= 1
            data = arrived.data
            self._mean_bytes += (len(data) - self._mean_bytes) / 64
            headers = own_headers(arrived.headers) if arrived.headers else {}
            if BLOB_HEADER in headers:
                data = await self._payload(arrived, headers)
            yield Message(arrived.subject, where.sequence, data, headers, where.at), where.pending

    async def _payload(self, message: Msg, headers: dict[str, str]) -> bytes:
        async def attempt() -> bytes:
            return await fetch(message.data, headers, self._blobs, message.subject)

        return await self._jetstream.patiently(f"fetch the payload of {message.subject}", attempt)

    async def _ask_for_more(self) -> None:
        want = max(2, min(MOST_MESSAGES, int(MOST_BYTES / max(self._mean_bytes, 1.0))))
        self._ask_below = want // 2
        if self._asked > self._ask_below:
            return
        request = {
            "batch": want - self._asked,
            "max_bytes": max(MOST_BYTES, self._connection.max_payload),
            "expires": int(PULL_SECONDS * _NANOSECONDS),
            "idle_heartbeat": int(HEARTBEAT_SECONDS * _NANOSECONDS),
        }
        await self._connection.send(self._pull, msgspec.json.encode(request), reply=f"{self._inbox}.{self._life_count}")
        self._asked = want

    @property
    def _pull(self) -> str:
        return f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"

    async def _next_arrived(self) -> Msg | None:
        """The next message or status of this life; None where it is lost or silent."""
        while True:
            if self._arrived:
                return self._arrived.popleft()
            if self._lost:
                return None
            self._wake.clear()
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                return None

    def _goes_on(self, status: Msg) -> bool:
        """Take note of a status message; False where the consumer is lost."""
        headers = status.headers or {}
        code, reason = headers.get("Status"), headers.get("Description", "").lower()
        if code == _HEARTBEAT:
            return True
        if status.subject.rpartition(".")[2] != str(self._life_count):
            return True  # of an earlier life
        if code == _EXPIRED or (code == _CONFLICT and not any(part in reason for part in _LOSING)):
            # This pull is over: what it didn't bring has to be asked for again.
            self._asked -= int(headers.get("Nats-Pending-Messages", self._asked))
            return True
        return False

    def _receive(self, message: Msg) -> None:
        self._arrived.append(message)
        self._wake.set()

    def _on_loss(self) -> None:
        self._lost = True
        self._wake.set()

    async def _delete_consumer(self) -> None:
        """Tidy up where that is quick; the server does it itself after a while."""
        if self._consumer and self._connection.connected:
            subject = f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._consumer}"
            with contextlib.suppress(UnavailableError):
                await self._connection.request(subject, b"", seconds=_DELETE_SECONDS)


class Unfetched(OrderedReader):
    """Messages as they stand: a payload that was moved to a blob is empty, and `BLOB_HEADER` names it."""

    async def _payload(self, message: Msg, headers: dict[str, str]) -> bytes:
        return b""
