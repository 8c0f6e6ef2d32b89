"""The buffer's pen: appends to CONTROL by compare-and-swap, so that exactly one writer's records follow each other.

Every append says after which sequence it stands. What is refused, or whose answer is lost, is looked up at the leader: one's
own record means done, another writer's means fenced, none means send again. The rules are docs/design/001-protocol.md, 4.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from towline.bus.client import Bus
from towline.bus.jetstream import FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS
from towline.bus.publish import NO_HEADERS, batch_was_lost
from towline.bus.topology import CONTROL, MAX_ATOMIC_MESSAGES
from towline.bus.wire import EXPECTED_LAST, STREAM_FULL, WRONG_LAST_SEQUENCE, ApiError, Stub, Unsettled
from towline.contract.codec import encode
from towline.contract.control import WriterRecord
from towline.errors import ConflictError, FencedError, InvariantError, TowlineError, UnavailableError, UsageError

MOST_CHUNK_BYTES = 16 << 20
"""Of records that go to the server as one batch."""

Records = Sequence[tuple[str, bytes]]


class ControlLog:
    """One writer's appends; the calls queue up behind each other.

    `last_sequence` is the stream's last as this writer knows it: set it after reading to the end, then `take_over`. `on_full`
    is called with True when an append begins to wait for room and with False when it has gone on. After an
    `UnavailableError` the fate of the last records is unknown: read on and take over again.
    """

    def __init__(self, bus: Bus, writer_id: str, *, on_full: Callable[[bool], None] | None = None) -> None:
        self.writer_id = writer_id
        self.last_sequence = 0
        self.on_full = on_full
        self._bus = bus
        self._publisher = bus.publisher
        self._jetstream = bus.jetstream
        self._connection = bus.connection
        self._stream = bus.topology.stream(CONTROL)
        self._turn = asyncio.Lock()
        self._stamps = 0
        self._ended: TowlineError | None = None

    def stamp(self) -> str:
        """The next record's `writer`: `ID/N`, which makes its bytes unique."""
        self._stamps += 1
        return f"{self.writer_id}/{self._stamps}"

    async def take_over(self) -> None:
        """Append `writer(id)` after `last_sequence`; whoever wrote before is fenced from then on.

        `ConflictError` where something was appended meanwhile: read on to the end and call again.
        """
        record = WriterRecord(writer=self.stamp(), at=time.time())
        self._ended = None
        try:
            await self.append([(self._bus.topology.control("writer"), encode(record))])
        except FencedError as error:
            self._ended = None
            raise ConflictError(f"{error.message}; read on to the end of CONTROL and take over again") from None

    async def append(self, records: Records) -> list[int]:
        """Append the records in their order; their sequences. `FencedError` where another writer has taken over.

        The first of them may stand, whole chunks of 1,000, when this raises. Waits for as long as the stream is full. The more
        records a call has, the faster they go: 3,000/s by eights, 50,000/s by thousands.
        """
        async with self._writing():
            left = await self._stow(records)
            sequences: list[int] = []
            while left:
                chunk = _head(left)
                sequences += await self._append_whole(chunk)
                left = left[len(chunk) :]
            return sequences

    async def append_atomic(self, records: Records, headers: Mapping[int, dict[str, str]] = NO_HEADERS) -> list[int]:
        """The same for at most 1,000 records, whole or not at all, whatever happens. `headers`: of some, by their place."""
        async with self._writing():
            stubs = await self._stow(records, headers)
            return await self._append_whole(stubs) if stubs else []

    @contextlib.asynccontextmanager
    async def _writing(self) -> AsyncIterator[None]:
        """One call at a time; and none after one that ended in doubt, until the next `take_over`."""
        async with self._turn:
            if self._ended is not None:
                raise self._ended
            self._ended = UnavailableError("the last append to CONTROL was broken off; read on and take over again")
            try:
                yield
            except (FencedError, UnavailableError) as error:
                self._ended = error
                raise
            except UsageError:
                self._ended = None  # refused before or whole: nothing of it stands
                raise
            self._ended = None

    async def _stow(self, records: Records, headers: Mapping[int, dict[str, str]] = NO_HEADERS) -> list[tuple[str, Stub]]:
        return [
            (subject, await self._publisher.stow(subject, data, headers.get(place)))
            for place, (subject, data) in enumerate(records)
        ]

    async def _append_whole(self, stubs: Sequence[tuple[str, Stub]]) -> list[int]:
        """One chunk, which stands as a whole after `last_sequence` or not at all; tried until one of both is certain.

        Chunks follow each other, never overlap: were the next one under way before this one's answer, a successor's record in
        this one's place would meet the next one's expectation, and a fenced writer's records would stand after it.
        """
        conditions = [{EXPECTED_LAST: str(self.last_sequence)}] + [{}] * (len(stubs) - 1)
        settling = _Settling(self)
        finished = False
        while not finished:
            fault: Unsettled | ApiError | None = None
            try:
                if len(stubs) == 1:
                    await self._publisher.put(*stubs[0], conditions[0])
                else:
                    await self._publisher.batch(stubs, conditions)
                finished = True
            except (Unsettled, ApiError) as error:
                fault = error
                finished = await self._stands(stubs[0])
            await settling.after(fault, finished=finished)
        first = self.last_sequence + 1
        self.last_sequence += len(stubs)
        return list(range(first, first + len(stubs)))

    async def _stands(self, record: tuple[str, Stub]) -> bool:
        """Whether the record is the one after `last_sequence`; `FencedError` where another writer's is."""
        subject, stub = record
        sequence = self.last_sequence + 1
        message = await self._jetstream.get_from_leader(self._stream, {"seq": sequence})
        if message is None:
            return False
        if message.subject == subject and stub.same_as(message.data, message.headers):
            return True
        raise FencedError(f"{self._stream} has another writer's record at {sequence}: this buffer was succeeded")

    async def _check_end(self) -> None:
        """After a refusal where nothing stands: the stream either lost its end or was appended to and purged."""
        state = await self._jetstream.stream_state(self._stream)
        if state.last_sequence < self.last_sequence:
            raise InvariantError(
                f"{self._stream} went backwards: it ends at {state.last_sequence}, {self.last_sequence} was acknowledged; "
                "its server lost data, so start a new run or restore it",
                code="stream_regressed",
            )
        if state.first_sequence > self.last_sequence + 1:
            raise FencedError(f"{self._stream} begins at {state.first_sequence}: this buffer was succeeded long ago")


def _head(stubs: list[tuple[str, Stub]]) -> list[tuple[str, Stub]]:
    """As many of the first as one batch takes."""
    size = 0
    for count, (_, stub) in enumerate(stubs[:MAX_ATOMIC_MESSAGES]):
        size += len(stub.data)
        if size > MOST_CHUNK_BYTES and count:
            return stubs[:count]
    return stubs[:MAX_ATOMIC_MESSAGES]


class _Settling:
    """What an append does between its tries: go on, wait for room without end, or give up after the client's patience."""

    def __init__(self, log: ControlLog) -> None:
        self._log = log
        self._patience_seconds = log._jetstream.patience_seconds
        self._since = time.monotonic()
        self._delay_seconds = FIRST_DELAY_SECONDS
        self._waits_for_room = False

    async def after(self, fault: Unsettled | ApiError | None, *, finished: bool) -> None:
        full = isinstance(fault, ApiError) and fault.err_code in STREAM_FULL
        self._tell(full and not finished)
        if finished:
            return
        if isinstance(fault, ApiError):
            await self._judge(fault)
        if not full and time.monotonic() - self._since > self._patience_seconds:
            raise UnavailableError(f"append to {self._log._stream}: gave up after {self._patience_seconds:g} s: {fault}")
        if full:
            self._since = time.monotonic()
        await asyncio.sleep(self._delay_seconds * random.uniform(0.75, 1.25))
        self._delay_seconds = min(2 * self._delay_seconds, LONGEST_DELAY_SECONDS)
        await self._log._connection.wait_connected(self._patience_seconds)

    async def _judge(self, fault: ApiError) -> None:
        if fault.err_code in WRONG_LAST_SEQUENCE:
            await self._log._check_end()
            return
        translated = fault.translated(f"append to {self._log._stream}")
        if not isinstance(translated, UnavailableError) and not batch_was_lost(fault):
            raise translated

    def _tell(self, waits: bool) -> None:
        if waits != self._waits_for_room:
            self._waits_for_room = waits
            if self._log.on_full is not None:
                self._log.on_full(waits)
