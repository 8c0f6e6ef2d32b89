"""Publishing into streams: every message is acknowledged, and every lost answer is resolved before the caller hears of it.

What may be repeated is made repeatable: by a message id (plain), by create-only with a look at what stands (`create`), or by
the whole of an atomic batch. Bytes in flight are bounded; whoever comes too fast waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from nats.aio.msg import Msg

from towline.bus.jetstream import ATTEMPT_SECONDS, JetStream
from towline.bus.topology import MAX_ATOMIC_MESSAGES
from towline.bus.wire import (
    EXPECTED_LAST_OF_SUBJECT,
    MESSAGE_ID,
    STREAM_FULL,
    WRONG_LAST_SEQUENCE,
    ApiError,
    Blobs,
    Stub,
    Unsettled,
    answer,
    fetch,
    header_bytes,
    stow,
)
from towline.errors import UnavailableError, UsageError

NO_HEADERS: Mapping[int, dict[str, str]] = MappingProxyType({})
_HEADROOM_BYTES = 512
"""Left free of the server's max_payload for the headers that are added to a stowed message."""


class Created(NamedTuple):
    """`won`: the subject's one message is the caller's, now or from an earlier try. Else `existing` is what stands there."""

    sequence: int
    won: bool
    existing: bytes | None


class ByteBudget:
    """At most `limit` bytes are out at a time, in the order of asking; a message larger than all of it goes alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._out = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, count: int) -> int:
        """Wait for room; the answer is what to give back."""
        count = min(count, self._limit)
        if self._waiting or self._out + count > self._limit:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((count, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.give(count)
                raise
        else:
            self._out += count
        return count

    def give(self, count: int) -> None:
        self._out -= count
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.done():
                if self._out + wanted > self._limit:
                    return
                self._out += wanted
                turn.set_result(None)
            self._waiting.popleft()

    @contextlib.asynccontextmanager
    async def hold(self, count: int) -> AsyncIterator[None]:
        taken = await self.take(count)
        try:
            yield
        finally:
            self.give(taken)


class Publisher:
    """Puts messages into streams, over one connection."""

    def __init__(self, jetstream: JetStream, blobs: Blobs | None, max_in_flight_bytes: int) -> None:
        self.jetstream = jetstream
        self.connection = jetstream.connection
        self.blobs = blobs
        self.budget = ByteBudget(max_in_flight_bytes)

    async def stow(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> Stub:
        """The message as it will be sent, its payload in the blob store where the server wouldn't take it."""
        if self.connection.connected and len(data) + header_bytes(headers or {}) <= self._room:
            return Stub(data, dict(headers or {}))

        async def attempt() -> Stub:
            return await stow(data, dict(headers or {}), self._room, self.blobs, subject)

        return await self.jetstream.patiently(f"put away the payload of {subject}", attempt)

    @property
    def _room(self) -> int:
        return self.connection.max_payload - _HEADROOM_BYTES

    async def publish(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> int:
        """Append a message; the sequence. A repeat within the stream's duplicate window isn't stored twice."""
        stub = await self.stow(subject, data, {MESSAGE_ID: secrets.token_hex(12), **(headers or {})})

        async def attempt() -> int:
            async with self.budget.hold(len(data)):
                return await self.put(subject, stub)

        return await self.jetstream.patiently(f"publish to {subject}", attempt)

    async def put(self, subject: str, stub: Stub, extra: dict[str, str] | None = None) -> int:
        """One try: the sequence; `ApiError`, or `Unsettled` where nobody knows."""
        headers = {**stub.headers, **(extra or {})}
        reply = await self.connection.request(subject, stub.data, seconds=ATTEMPT_SECONDS, headers=headers or None)
        return int(answer(reply)["seq"])

    async def create(self, stream: str, subject: str, data: bytes, headers: dict[str, str] | None = None) -> Created:
        """The subject's one and only message. Whoever finds another's there is told which."""
        stub = await self.stow(subject, data, headers)
        doubtful = False

        async def attempt() -> Created:
            nonlocal doubtful
            if doubtful:
                standing = await self._standing(stream, subject, stub)
                if standing is not None:
                    return standing
            try:
                async with self.budget.hold(len(data)):
                    return Created(await self.put(subject, stub, {EXPECTED_LAST_OF_SUBJECT: "0"}), True, None)
            except Unsettled:
                doubtful = True
                raise
            except ApiError as error:
                if error.err_code not in WRONG_LAST_SEQUENCE:
                    raise
                standing = await self._standing(stream, subject, stub)
                if standing is None:  # purged between the refusal and the look
                    raise UnavailableError(f"{subject} was refused as taken, and nothing stands there") from None
                return standing

        return await self.jetstream.patiently(f"create {subject}", attempt)

    async def _standing(self, stream: str, subject: str, stub: Stub) -> Created | None:
        """What stands on the subject, judged against our own message; None where nothing does."""
        message = await self.jetstream.get_from_leader(stream, {"last_by_subj": subject})
        if message is None:
            return None
        if stub.same_as(message.data, message.headers):
            return Created(message.sequence, True, None)
        return Created(message.sequence, False, await fetch(message.data, message.headers, self.blobs, subject))

    async def create_all(
        self, stream: str, messages: Sequence[tuple[str, bytes]], headers: Mapping[int, dict[str, str]] = NO_HEADERS
    ) -> list[int] | None:
        """All of them, each the only one on its subject, or none: None where others stand there. `headers`: of some, by place."""
        stubs = [(subject, await self.stow(subject, data, headers.get(place))) for place, (subject, data) in enumerate(messages)]
        create_only = [{EXPECTED_LAST_OF_SUBJECT: "0"}] * len(stubs)
        doubtful = False

        async def attempt() -> list[int] | None:
            nonlocal doubtful
            if doubtful:
                standing = [await self._standing(stream, subject, stub) for subject, stub in stubs]
                if any(standing):
                    return [item.sequence for item in standing if item and item.won] if _all_won(standing) else None
            try:
                return await self.batch(stubs, create_only)
            except Unsettled:
                doubtful = True
                raise
            except ApiError as error:
                if error.err_code not in WRONG_LAST_SEQUENCE:
                    doubtful = True
                    raise UnavailableError(f"the batch was refused: {error}") if batch_was_lost(error) else error from None
                standing = [await self._standing(stream, subject, stub) for subject, stub in stubs]
                return [item.sequence for item in standing if item and item.won] if _all_won(standing) else None

        return await self.jetstream.patiently(f"create {len(stubs)} messages from {messages[0][0]}", attempt)

    async def batch(self, stubs: Sequence[tuple[str, Stub]], extra: Sequence[dict[str, str]]) -> list[int]:
        """One try of an atomic batch: the sequences, dense. `extra[i]` are message i's conditions."""
        if not 1 <= len(stubs) <= MAX_ATOMIC_MESSAGES:
            raise UsageError(f"an atomic batch has 1 to {MAX_ATOMIC_MESSAGES} messages, not {len(stubs)}", code="batch_size")
        batch_id = secrets.token_hex(12)
        size = sum(len(stub.data) for _, stub in stubs)
        async with self.budget.hold(size):
            last: asyncio.Future[Msg] | None = None
            try:
                for number, ((subject, stub), conditions) in enumerate(zip(stubs, extra, strict=True), 1):
                    headers = {**stub.headers, **conditions, "Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(number)}
                    if number < len(stubs):
                        await self.connection.send(subject, stub.data, headers=headers)
                    else:
                        headers["Nats-Batch-Commit"] = "1"
                        last = await self.connection.post(subject, stub.data, headers=headers)
                assert last is not None
                reply = await self.connection.answer(last, stubs[-1][0], ATTEMPT_SECONDS)
            finally:
                if last is not None:
                    last.cancel()
        sequence = int(answer(reply)["seq"])
        return list(range(sequence - len(stubs) + 1, sequence + 1))


def _all_won(standing: Sequence[Created | None]) -> bool:
    return all(item is not None and item.won for item in standing)


def batch_was_lost(error: ApiError) -> bool:
    """Whether not its content was the matter: its beginning was lost with a connection, or too many batches are open."""
    return error.err_code not in STREAM_FULL and "batch" in error.description.lower()
