"""The hop worker -> durable -> trainer in three systems: Towline's bus client, nats-py alone, and the S3 client alone.

Towline's way is a worker's and a trainer's: a create-only publish, and a fetch of many together, each checked against the digest;
the sequences come as CONTROL's batch records bring them. nats-py's is the plainest that is as durable: publish with its ack,
fetch from a durable pull consumer, ack.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import nats
import xxhash

from towline.bus.client import Bus
from towline.bus.topology import TRAJECTORY
from towline.config import BusSettings, StoreSettings
from towline.errors import CorruptError
from towline.store.blobs import Blobs
from towline.store.objects import ObjectStore, open_store

if TYPE_CHECKING:
    from towline.loadtest.ends import Plan, Sink, Source

TOLD_AT_ONCE = 16
"""Sequences that the consumer hears of together: a batch record names many rows."""
LANES = 4
"""Of requests for many: the window in as many parts, so that one is on its way while another is looked at."""
FETCH_SECONDS = 5.0


def source_of(plan: Plan) -> Source:
    sources: dict[str, Callable[[Plan], Source]] = {"towline": _TowlineSource, "nats": _NatsSource, "s3": _S3Source}
    return sources[plan.system](plan)


def sink_of(plan: Plan) -> Sink:
    sinks: dict[str, Callable[[Plan], Sink]] = {"towline": _TowlineSink, "nats": _NatsSink, "s3": _S3Sink}
    return sinks[plan.system](plan)


class _Teller:
    """Says which messages stand, some at a time; the last ones after a moment."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._waiting = plan, list[Any]()
        self._client: Any = None
        self._late: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        self._client = await nats.connect(self._plan.bus["url"])

    async def say(self, what: Any) -> None:
        self._waiting.append(what)
        if len(self._waiting) >= TOLD_AT_ONCE:
            await self._tell()
        elif self._late is None:
            self._late = asyncio.get_running_loop().call_later(0.002, lambda: asyncio.ensure_future(self._tell()))

    async def _tell(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
        told, self._waiting = self._waiting, []
        if told:
            await self._client.publish(f"told.{self._plan.run}", json.dumps(told).encode())

    async def close(self) -> None:
        await self._tell()
        await self._client.close()


class _Heard:
    """The other side of `_Teller`: what was told, one by one."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self._client: Any = None

    async def open(self) -> None:
        self._client = await nats.connect(self._plan.bus["url"])

        async def take(message: Any) -> None:
            for item in json.loads(message.data):
                self.queue.put_nowait(item)

        await self._client.subscribe(f"told.{self._plan.run}", cb=take)
        await self._client.flush()

    async def close(self) -> None:
        await self._client.close()


class _TowlineSource:
    def __init__(self, plan: Plan) -> None:
        self._plan, self._teller = plan, _Teller(plan)
        self._bus: Bus

    async def open(self) -> None:
        self._bus = await _bus(self._plan)
        await self._teller.open()

    async def send(self, number: int, payload: bytes) -> None:
        group, sample = self._plan.sender * 10**6 + number // 8, number % 8
        digest = xxhash.xxh3_128_hexdigest(payload)
        created = await self._bus.create(self._bus.topology.trajectory(group, sample), payload)
        await self._teller.say([group, sample, created.sequence, digest])

    async def close(self) -> None:
        await self._teller.close()
        await self._bus.close()


class _TowlineSink:
    def __init__(self, plan: Plan) -> None:
        self._plan, self._heard = plan, _Heard(plan)
        self._bus: Bus

    async def open(self) -> None:
        self._bus = await _bus(self._plan)
        await self._heard.open()

    async def receive(self) -> AsyncIterator[bytes]:
        trajectory = self._bus.topology.trajectory

        async def some(items: list[Any]) -> list[bytes]:
            places = [(trajectory(group, sample), sequence) for group, sample, sequence, _ in items]
            together = await self._bus.get_together(TRAJECTORY, places)

            async def one(sequence: int, digest: str) -> bytes:
                message = together.get(sequence) or await self._bus.get(TRAJECTORY, sequence)
                if xxhash.xxh3_128_hexdigest(message.data) != digest:
                    raise CorruptError(f"trajectory {sequence} isn't what was sent", code="digest")
                return message.data

            return await asyncio.gather(*(one(sequence, digest) for _, _, sequence, digest in items))

        lanes = min(LANES, self._plan.window)
        async for payloads in _pooled(self._heard.queue, lanes, some, self._plan.window // lanes):
            for payload in payloads:
                yield payload

    async def close(self) -> None:
        await self._heard.close()
        await self._bus.close()


class _NatsSource:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._client: Any = None
        self._jetstream: Any = None

    async def open(self) -> None:
        self._client = await nats.connect(self._plan.bus["url"])
        self._jetstream = self._client.jetstream()

    async def send(self, number: int, payload: bytes) -> None:
        await self._jetstream.publish(f"raw.{self._plan.run}.{self._plan.sender}", payload, timeout=60)

    async def close(self) -> None:
        await self._client.close()


class _NatsSink:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._client: Any = None
        self._subscription: Any = None

    async def open(self) -> None:
        self._client = await nats.connect(self._plan.bus["url"])
        jetstream = self._client.jetstream()
        config = nats.js.api.ConsumerConfig(ack_wait=60, max_ack_pending=4096)
        self._subscription = await jetstream.pull_subscribe(
            f"raw.{self._plan.run}.>", durable="sink", stream=self._plan.stream, config=config
        )

    async def receive(self) -> AsyncIterator[bytes]:
        while True:
            try:
                messages = await self._subscription.fetch(self._plan.window, timeout=FETCH_SECONDS)
            except TimeoutError:
                continue
            for message in messages:
                await message.ack()
                yield message.data

    async def close(self) -> None:
        await self._client.close()


class _S3Source:
    """The S3 client that Towline's own store uses, without anything around it."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._teller = plan, _Teller(plan)
        self._put: Any = None

    async def open(self) -> None:
        client, bucket = _minio(self._plan)
        self._put = lambda name, data: client.put_object(bucket, name, io.BytesIO(data), len(data))
        await self._teller.open()

    async def send(self, number: int, payload: bytes) -> None:
        name = f"raw/{self._plan.run}/{self._plan.sender}-{number}"
        await asyncio.to_thread(self._put, name, payload)
        await self._teller.say(name)

    async def close(self) -> None:
        await self._teller.close()


class _S3Sink:
    def __init__(self, plan: Plan) -> None:
        self._plan, self._heard = plan, _Heard(plan)
        self._client: Any = None
        self._bucket = ""

    async def open(self) -> None:
        self._client, self._bucket = _minio(self._plan)
        await self._heard.open()

    async def receive(self) -> AsyncIterator[bytes]:
        def read(name: str) -> bytes:
            response = self._client.get_object(self._bucket, name)
            try:
                return bytes(response.read())
            finally:
                response.close()
                response.release_conn()

        async for payload in _pooled(self._heard.queue, self._plan.window, lambda names: asyncio.to_thread(read, names[0]), 1):
            yield payload

    async def close(self) -> None:
        await self._heard.close()


async def _pooled(queue: asyncio.Queue[Any], lanes: int, fetch: Any, most: int) -> AsyncIterator[Any]:
    """What is told, fetched by as many lanes, up to `most` in one call, in the order of arrival."""
    done: asyncio.Queue[Any] = asyncio.Queue()

    async def lane() -> None:
        while True:
            items = [await queue.get()]
            while len(items) < most and not queue.empty():
                items.append(queue.get_nowait())
            try:
                done.put_nowait(await fetch(items))
            except Exception as error:  # noqa: BLE001  it's raised where the payload is awaited
                done.put_nowait(error)

    tasks = [asyncio.create_task(lane()) for _ in range(lanes)]
    try:
        while True:
            found = await done.get()
            if isinstance(found, Exception):
                raise found
            yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _bus(plan: Plan) -> Bus:
    blobs = Blobs(_store(plan), plan.run)
    return await Bus.connect(BusSettings(**plan.bus), run=plan.run, client_name=f"hop-{plan.role}-{plan.sender}", blobs=blobs)


def _store(plan: Plan) -> ObjectStore:
    return open_store(StoreSettings(**plan.store))


def _minio(plan: Plan) -> tuple[Any, str]:
    import urllib3
    from minio import Minio

    settings = StoreSettings(**plan.store)
    bucket = settings.url.removeprefix("s3://").partition("/")[0]
    host = settings.endpoint.partition("://")[2]
    pool = urllib3.PoolManager(maxsize=max(plan.window, 10), timeout=60, retries=False)
    client = Minio(
        host, settings.access_key, settings.secret_key.get_secret_value(), secure=settings.endpoint.startswith("https"),
        region=settings.region, http_client=pool,
    )  # fmt: skip
    return client, bucket
