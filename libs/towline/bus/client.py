"""The bus as Towline's parts use it: a run's streams, consumers, buckets and hints over one connection.

Calls are bounded and repeat what is safe to repeat; the connection comes back by itself. A payload that is larger than the
server takes travels through the blob store, and nobody but this package notices. What can't be had raises `UnavailableError`
after the client's patience, `FullError` where a stream has no room, `UsageError` where the server refuses a permission.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

import msgspec
import structlog
from nats.aio.msg import Msg

from towline.bus.connection import Connection
from towline.bus.consumer import Consumer, Delivery
from towline.bus.jetstream import PATIENCE_SECONDS, JetStream, StreamState
from towline.bus.kv import Bucket
from towline.bus.publish import NO_HEADERS, Created, Publisher
from towline.bus.read import OrderedReader
from towline.bus.together import get_together
from towline.bus.topology import STREAMS, BucketSpec, ConsumerSpec, StreamSpec, Topology
from towline.bus.wire import Blobs, Message, Unsettled, fetch
from towline.config import BusSettings
from towline.contract.policy import PolicyMessage, decode_policy
from towline.errors import MalformedError, MissingError, UsageError

__all__ = ["Bucket", "Bus", "Consumer", "Created", "Delivery", "Message", "StreamState"]

HINTS_KEPT = 256
"""Hints that wait for a slow listener; older ones are dropped."""
_HEADER_LIMIT_CHARACTERS = 2000
_log = structlog.get_logger("towline.bus")


class Bus:
    """A run's bus. `connect` makes one; `close` ends it."""

    def __init__(self, connection: Connection, topology: Topology, settings: BusSettings, blobs: Blobs | None, patience: float):
        self.connection = connection
        self.topology = topology
        self.blobs = blobs
        self.jetstream = JetStream(connection, topology, settings, patience)
        self.publisher = Publisher(self.jetstream, blobs, settings.max_in_flight_bytes)
        self._stream_by_kind = {
            subject.partition(".")[0]: topology.stream(spec)
            for spec in STREAMS
            for subject in spec.subjects
            if subject.count(".") == 1 and subject.endswith(".>")
        }
        self._buckets: dict[str, Bucket] = {}
        self.on_dead: Callable[[str], None] = lambda stage: None
        """Called with the stage of each dead letter that is written."""

    @classmethod
    async def connect(
        cls,
        settings: BusSettings,
        *,
        run: str,
        client_name: str,
        blobs: Blobs | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> Bus:
        """Connect within `settings.connect_timeout_seconds`. Calls on a bus that goes away give up after `patience_seconds`."""
        topology = Topology(run, settings.site, settings.sites)
        return cls(await Connection.open(settings, client_name), topology, settings, blobs, patience_seconds)

    async def close(self) -> None:
        await self.connection.close()

    @property
    def connected(self) -> bool:
        return self.connection.connected

    @property
    def last_error(self) -> str | None:
        """Why the connection is away, or what the server refused last."""
        return self.connection.last_error

    @property
    def max_payload(self) -> int:
        """Bytes of one message, headers included; larger ones become blobs."""
        return self.connection.max_payload

    async def ensure(self) -> None:
        """Create what is missing of the run's streams and buckets, and set right what differs. `UsageError` where the budget
        doesn't fit the server's storage."""
        await self.jetstream.ensure()

    # Writing

    async def publish(self, subject: str, data: bytes, *, headers: dict[str, str] | None = None) -> int:
        """Append a message to the subject's stream; its sequence. A stream that stays full raises `FullError`: keep it, wait
        and call again."""
        return await self.publisher.publish(subject, data, headers)

    async def create(self, subject: str, data: bytes, *, headers: dict[str, str] | None = None) -> Created:
        """The subject's one and only message: `won`, or what stands there."""
        return await self.publisher.create(self._stream_of([subject]), subject, data, headers)

    async def create_all(
        self, messages: Sequence[tuple[str, bytes]], *, headers: Mapping[int, dict[str, str]] = NO_HEADERS
    ) -> list[int] | None:
        """All the messages, each the only one on its subject, as one atomic batch of at most 1,000; their sequences. None
        where others were first, with any of them; then none is stored. `headers`: of some, by their place."""
        return await self.publisher.create_all(self._stream_of([subject for subject, _ in messages]), messages, headers)

    async def ack_of(self, receipt: str) -> None:
        """A delivery's ack by whoever has its receipt. Like the delivery's own it doesn't wait; a lost one brings it again."""
        with contextlib.suppress(Unsettled):
            await self.connection.send(receipt, b"+ACK")

    async def in_progress_of(self, receipt: str) -> None:
        """The same for its sign of life."""
        with contextlib.suppress(Unsettled):
            await self.connection.send(receipt, b"+WPI")

    async def dead(self, stage: str, data: bytes, reason: str, **context: object) -> None:
        """Keep a message that nobody could act on, whole, with the reason and where it came from."""
        headers = {
            "Towline-Reason": " ".join(reason.split())[:_HEADER_LIMIT_CHARACTERS],
            "Towline-Context": msgspec.json.encode(context, enc_hook=str).decode()[:_HEADER_LIMIT_CHARACTERS],
        }
        await self.publish(self.topology.dead(stage), data, headers=headers)
        self.on_dead(stage)

    # Reading

    async def get(self, spec: StreamSpec, sequence: int, *, leader: bool = False) -> Message:
        """The message at `sequence`: from any server, or the leader's word. `MissingError` where it isn't there."""
        stream = self.topology.stream(spec)
        message = None if leader else await self.jetstream.get_direct(stream, sequence)
        if message is None:
            message = await self.jetstream.get_from_leader(stream, {"seq": sequence})
        if message is None:
            raise MissingError(f"{stream} has no message {sequence}: it was purged, or never written", code="message_missing")
        return await self._whole(message)

    async def get_many(self, spec: StreamSpec, sequences: Iterable[int], *, in_flight: int = 64) -> list[Message | None]:
        """The messages at `sequences`, in their order; None for each that isn't there."""
        gate = asyncio.Semaphore(in_flight)

        async def one(sequence: int) -> Message | None:
            async with gate:
                try:
                    return await self.get(spec, sequence)
                except MissingError:
                    return None

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(sequence)) for sequence in sequences]
        return [task.result() for task in tasks]

    async def get_together(self, spec: StreamSpec, places: Iterable[tuple[str, int]]) -> dict[int, Message]:
        """Messages by subject and sequence, each the only one on its subject, in a request for many; by sequence. A short cut:
        one that isn't among them may be there all the same, and `get` says. Never an error of the bus's."""
        return await get_together(self.connection, self.topology.stream(spec), places)

    async def last(self, spec: StreamSpec, subject: str) -> Message | None:
        """The subject's last message, from the leader."""
        message = await self.jetstream.get_from_leader(self.topology.stream(spec), {"last_by_subj": subject})
        return None if message is None else await self._whole(message)

    async def read(
        self, spec: StreamSpec, *, start: int = 1, subjects: Sequence[str] | None = None, follow: bool = True
    ) -> AsyncGenerator[Message, None]:
        """Messages from sequence `start` on, in order, each once, over lost connections; `subjects` (full ones, wildcards
        allowed) narrows them. `follow=False` ends where the stream ended at the start. A reader that stops early closes it:
        `async with contextlib.aclosing(bus.read(…)) as messages`."""
        reader = OrderedReader(
            self.jetstream, self.topology.stream(spec), self.blobs, start=start, subjects=subjects, follow=follow
        )
        async with contextlib.aclosing(reader.messages()) as messages:
            async for message in messages:
                yield message

    async def consumer(self, spec: ConsumerSpec) -> Consumer:
        """The durable consumer, made where it's missing; one that is there keeps its settings."""
        consumer = Consumer(self.jetstream, spec, self.blobs)
        await consumer.start()
        return consumer

    async def subscribe_hints(self, *kinds: str) -> AsyncGenerator[PolicyMessage, None]:
        """policy.* messages of these kinds as they come. Hints: some may be missed, none ever holds up the bus."""
        kept: deque[Msg] = deque(maxlen=HINTS_KEPT)
        wake = asyncio.Event()

        def receive(message: Msg) -> None:
            kept.append(message)
            wake.set()

        subscriptions = [await self.connection.subscribe(self.topology.policy(kind), receive) for kind in kinds]
        try:
            while True:
                await wake.wait()
                wake.clear()
                while kept:
                    message = kept.popleft()
                    try:
                        yield decode_policy(await fetch(message.data, message.headers or {}, self.blobs, message.subject))
                    except MalformedError as error:
                        _log.warning("hint_unreadable", subject=message.subject, reason=error.message)
        finally:
            for subscription in subscriptions:
                await subscription.close()

    def kv(self, spec: BucketSpec) -> Bucket:
        name = self.topology.bucket(spec)
        return self._buckets.setdefault(name, Bucket(self.jetstream, self.publisher, name))

    async def stream_state(self, spec: StreamSpec) -> StreamState:
        """From the leader. A cursor keeps `created_at` beside its sequence: where either went backwards, the stream was lost."""
        return await self.jetstream.stream_state(self.topology.stream(spec))

    async def _whole(self, message: Message) -> Message:
        async def attempt() -> bytes:
            return await fetch(message.data, message.headers, self.blobs, message.subject)

        data = await self.jetstream.patiently(f"fetch the payload of {message.subject}", attempt)
        return Message(message.subject, message.sequence, data, message.headers, message.at)

    def _stream_of(self, subjects: Sequence[str]) -> str:
        """The one stream that the run's topology has for these subjects."""
        kinds = {self.topology.relative(subject).partition(".")[0] for subject in subjects}
        if len(kinds) != 1 or not kinds <= self._stream_by_kind.keys():
            raise UsageError(
                f"no one stream of run {self.topology.run} has {', '.join(subjects) or 'no subject'}", code="subject"
            )
        return self._stream_by_kind[kinds.pop()]
