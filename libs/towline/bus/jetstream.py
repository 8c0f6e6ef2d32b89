"""JetStream's request API over a connection, with bounded repeats; and the streams and buckets of a run as it wants them."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

from towline.bus.connection import Connection
from towline.bus.pages import paged_subjects
from towline.bus.sites import kept, placed, stream_of, syncs
from towline.bus.topology import BUCKET_BYTES, BUCKETS, STREAMS, BucketSpec, StreamSpec, Topology
from towline.bus.wire import NO_STORAGE, NOT_FOUND, ApiError, Message, Unsettled, answer, own_headers, timestamp
from towline.config import BusSettings
from towline.errors import FullError, MissingError, UnavailableError, UsageError

PATIENCE_SECONDS = 30.0
"""How long a call is repeated. A cluster that lost its leader may be silent for 7 s."""
ATTEMPT_SECONDS = 5.0
FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.02, 1.0
DUPLICATE_WINDOW_SECONDS = 120.0
_NANOSECONDS = 1_000_000_000
_HEADER_LINE = "NATS/1.0"

T = TypeVar("T")
_encode = msgspec.json.encode
MAX_CONSUMERS = 100_000
"""Of a stream: each rollout worker follows CONTROL with one of its own. nats-server 2.15 allows 1,000 where nothing is said."""


class StreamState(NamedTuple):
    """`created_at` (RFC 3339) and `last_sequence` show a stream that was lost or went backwards."""

    created_at: str
    first_sequence: int
    last_sequence: int
    messages: int
    bytes: int
    max_bytes: int


class JetStream:
    """Requests to `$JS.API`; every one is bounded by `patience_seconds`."""

    def __init__(
        self, connection: Connection, topology: Topology, settings: BusSettings, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self.connection = connection
        self.topology = topology
        self.settings = settings
        self.patience_seconds = patience_seconds

    async def patiently(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """`attempt` until it gives a result, with a back-off, while its errors may pass by themselves and time is left.

        Only for what may be repeated. `FullError` or `UnavailableError` in the end; others at once.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.patience_seconds
        delay = FIRST_DELAY_SECONDS
        while True:
            try:
                await self.connection.wait_connected(max(deadline - clock(), 0.0))
                return await attempt()
            except (UnavailableError, ApiError) as error:
                fault = error.translated(what) if isinstance(error, ApiError) else error
                if not isinstance(fault, UnavailableError):
                    raise fault from None
                if clock() + delay > deadline:
                    kind = FullError if isinstance(fault, FullError) else UnavailableError
                    message = f"{what}: gave up after {self.patience_seconds:g} s: {fault.message.removeprefix(f'{what}: ')}"
                    raise kind(message, code=fault.code) from None
            await asyncio.sleep(delay * random.uniform(0.75, 1.25))
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)

    async def call(self, what: str, api: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One idempotent API request, repeated where it may help. `ApiError` for the refusals that are final."""

        async def attempt() -> dict[str, Any] | ApiError:
            reply = await self.connection.request(f"$JS.API.{api}", _encode(body) if body else b"", seconds=ATTEMPT_SECONDS)
            try:
                return answer(reply)
            except ApiError as error:
                if error.may_pass:
                    raise
                return error

        result = await self.patiently(what, attempt)
        if isinstance(result, ApiError):
            try:
                raise result
            finally:
                del result  # its traceback has this frame: a cycle otherwise, for each "no such message"
        return result

    # Messages by their place

    async def get_from_leader(self, stream: str, query: dict[str, Any]) -> Message | None:
        """STREAM.MSG.GET: what the stream's leader has. None where there is no such message."""
        try:
            content = await self.call(f"read {stream}", f"STREAM.MSG.GET.{stream}", query)
        except ApiError as error:
            if error.code == NOT_FOUND:
                return None
            raise error.translated(f"read {stream}") from None
        return stored(content["message"])

    async def get_direct(self, stream: str, sequence: int) -> Message | None:
        """DIRECT.GET: what any of the stream's servers has, in one short round trip. It may lag: None isn't the last word."""
        subject = f"$JS.API.DIRECT.GET.{stream}"

        async def attempt() -> Message | None:
            reply = await self.connection.request(subject, b'{"seq":%d}' % sequence, seconds=ATTEMPT_SECONDS)
            headers = reply.headers or {}
            if "Status" in headers:
                if headers["Status"] == str(NOT_FOUND):
                    return None
                raise Unsettled(f"{headers['Status']} {headers.get('Description', '')}")
            return Message(
                headers["Nats-Subject"], int(headers["Nats-Sequence"]), reply.data, own_headers(headers),
                timestamp(headers["Nats-Time-Stamp"]),
            )  # fmt: skip

        return await self.patiently(f"read {stream}", attempt)

    async def stream_state(self, stream: str) -> StreamState:
        """The stream's bounds and sizes, from its leader. `MissingError` where it doesn't exist."""
        try:
            info = await self.call(f"look at {stream}", f"STREAM.INFO.{stream}")
        except ApiError as error:
            if error.code == NOT_FOUND:
                raise MissingError(f"stream {stream} doesn't exist; is the run's name right, is a service running?") from None
            raise error.translated(f"look at {stream}") from None
        state = info["state"]
        return StreamState(
            info["created"], state["first_seq"], state["last_seq"], state["messages"], state["bytes"],
            info["config"]["max_bytes"],
        )  # fmt: skip

    async def subjects(self, stream: str, pattern: str) -> set[str]:
        """The subjects that match and have a message. `MissingError` where the stream doesn't exist."""

        async def ask(query: dict[str, Any]) -> dict[str, Any]:
            try:
                return await self.call(f"list {stream}", f"STREAM.INFO.{stream}", query)
            except ApiError as error:
                if error.code == NOT_FOUND:
                    raise MissingError(f"stream {stream} doesn't exist; is the run's name right, is a service running?") from None
                raise error.translated(f"list {stream}") from None

        return await paged_subjects(ask, pattern)

    # A run's streams

    async def ensure(self) -> None:
        """Create what is missing of the run's streams and buckets, and set right what differs."""
        reserved = BUCKET_BYTES * len(BUCKETS)
        budget = self.settings.budget_bytes - reserved
        for spec in STREAMS:
            await self._ensure(placed(self._stream_config(spec, int(budget * spec.budget_share)), spec, self.settings))
        for bucket in BUCKETS:
            config = self._bucket_config(bucket, max(BUCKET_BYTES, int(budget * bucket.budget_share)))
            await self._ensure(placed(config, bucket, self.settings))
        for part in (*STREAMS, *BUCKETS):
            for sync in syncs(self.topology, part):
                await self._ensure_sync(stream_of(self.topology, part), sync)

    async def _ensure_sync(self, stream: str, wanted: dict[str, Any]) -> None:
        """One that is there stays as it is: it knows how far the other side is."""
        what, where = f"set up {wanted['name']} of {stream}", f"{stream}.{wanted['name']}"
        try:
            await self.call(what, f"CONSUMER.INFO.{where}")
        except ApiError as error:
            if error.code != NOT_FOUND:
                raise UsageError(f"{what}: {error}", code="bus_stream") from None
            try:
                await self.call(what, f"CONSUMER.CREATE.{where}", {"stream_name": stream, "config": wanted})
            except ApiError as refused:
                raise UsageError(f"{what}: {refused}", code="bus_stream") from None

    async def _ensure(self, wanted: dict[str, Any] | None) -> None:
        if wanted is None:
            return
        name = wanted["name"]
        what = f"set up stream {name}"
        try:
            try:
                info = await self.call(what, f"STREAM.INFO.{name}")
            except ApiError as error:
                if error.code != NOT_FOUND:
                    raise
                await self.call(what, f"STREAM.CREATE.{name}", wanted)
                return
            wanted = {key: value for key, value in wanted.items() if key != "max_consumers"}  # an older server won't change it
            wanted = kept(wanted, info["config"])
            if any(info["config"].get(key) != value for key, value in wanted.items()):
                await self.call(what, f"STREAM.UPDATE.{name}", info["config"] | wanted)
        except ApiError as error:
            if error.err_code == NO_STORAGE:
                raise UsageError(
                    f"bus.budget_bytes = {self.settings.budget_bytes} has no room on the server at stream {name}: {error}; "
                    "lower it, remove old runs, or raise the server's jetstream max_file_store",
                    code="bus_budget",
                ) from None
            raise UsageError(f"{what}: {error}", code="bus_stream") from None

    def _stream_config(self, spec: StreamSpec, max_bytes: int) -> dict[str, Any]:
        config: dict[str, Any] = {
            "name": self.topology.stream(spec),
            "subjects": [self.topology.subject(subject) for subject in spec.subjects],
            "retention": "limits",
            "storage": "file",
            "discard": "new",
            "max_bytes": max_bytes,
            "max_msgs": -1,
            "max_consumers": MAX_CONSUMERS,
            "max_msgs_per_subject": spec.max_msgs_per_subject,
            "num_replicas": self.settings.replicas,
            "duplicate_window": int(DUPLICATE_WINDOW_SECONDS * _NANOSECONDS),
            "allow_direct": True,
        }
        if spec.atomic:
            config["allow_atomic"] = True
        return config

    def _bucket_config(self, spec: BucketSpec, max_bytes: int) -> dict[str, Any]:
        """As every client's key-value layer makes a bucket, so that `nats kv` reads it."""
        name = self.topology.bucket(spec)
        ttl = spec.ttl_seconds or 0.0
        return {
            "name": f"KV_{name}",
            "subjects": [f"$KV.{name}.>"],
            "retention": "limits",
            "storage": "file",
            "discard": "new",
            "max_bytes": max_bytes,
            "max_age": int(ttl * _NANOSECONDS),
            "max_msgs_per_subject": spec.history,
            "num_replicas": self.settings.replicas,
            "duplicate_window": int(min(ttl or DUPLICATE_WINDOW_SECONDS, DUPLICATE_WINDOW_SECONDS) * _NANOSECONDS),
            "allow_direct": True,
            "allow_rollup_hdrs": True,
            "deny_delete": True,
        }


def stored(message: dict[str, Any]) -> Message:
    """What STREAM.MSG.GET answers with."""
    return Message(
        subject=message["subject"],
        sequence=message["seq"],
        data=base64.b64decode(message.get("data", "")),
        headers=_headers(base64.b64decode(message["hdrs"])) if "hdrs" in message else {},
        at=timestamp(message["time"]),
    )


def _headers(block: bytes) -> dict[str, str]:
    lines = block.decode("utf-8", "replace").split("\r\n")
    if not lines[0].startswith(_HEADER_LINE):
        return {}
    pairs = (line.partition(":") for line in lines[1:] if line)
    return {name.strip(): value.strip() for name, _, value in pairs}
