"""Requests to the JetStream of another domain, over a site's connection: one try each, since the line may be cut for long.

Whoever asks does so again at its next round; what it asked for is safe to repeat.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from towline.bus.connection import Connection
from towline.bus.jetstream import stored
from towline.bus.pages import paged_subjects
from towline.bus.sites import domain_api
from towline.bus.topology import ConsumerSpec
from towline.bus.wire import NOT_FOUND, ApiError, Message, answer
from towline.errors import UnavailableError

SECONDS = 5.0
"""For an answer. A line that was cut without a word swallows a request; one that is known to be gone refuses it at once."""
_NANOSECONDS = 1_000_000_000


class Across:
    """The JetStream of `domain`. Every call raises `UnavailableError` where it doesn't answer now."""

    def __init__(self, connection: Connection, domain: str) -> None:
        self.domain = domain
        self._connection = connection

    async def call(self, api: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """The answer; None where there is no such stream, consumer or message."""
        what = f"{api} at {self.domain}"
        subject = f"{domain_api(self.domain)}.{api}"
        try:
            return answer(await self._connection.request(subject, msgspec.json.encode(body) if body else b"", seconds=SECONDS))
        except ApiError as error:
            if error.code == NOT_FOUND:
                return None
            raise UnavailableError(f"{what}: {error}", code="site") from None

    async def bounds(self, stream: str) -> tuple[int, int]:
        """First and last sequence; (1, 0) where it isn't there."""
        info = await self.call(f"STREAM.INFO.{stream}")
        return (1, 0) if info is None else (max(int(info["state"]["first_seq"]), 1), int(info["state"]["last_seq"]))

    async def purge_below(self, stream: str, floor: int) -> int:
        """Take away what stands below `floor`, and never what isn't there yet; how many sequences went."""
        first, last = await self.bounds(stream)
        floor = min(floor, last + 1)
        if floor <= first:
            return 0
        await self.call(f"STREAM.PURGE.{stream}", {"seq": floor})
        return floor - first

    async def purge_subject(self, stream: str, subject: str) -> None:
        await self.call(f"STREAM.PURGE.{stream}", {"filter": subject})

    async def subjects(self, stream: str, pattern: str) -> set[str]:
        """Those that match and have a message; none where the stream isn't there."""
        return await paged_subjects(lambda query: self.call(f"STREAM.INFO.{stream}", query), pattern)

    async def confirmed(self, stream: str, durable: str) -> int:
        """The stream's sequence up to which whoever reads by the consumer has said that it has all; 0 where it isn't there."""
        info = await self.call(f"CONSUMER.INFO.{stream}.{durable}")
        return 0 if info is None else int(info["ack_floor"]["stream_seq"])

    async def message(self, stream: str, sequence: int) -> Message | None:
        """As it stands, a payload that is a blob isn't fetched; None where there is none."""
        found = await self.call(f"STREAM.MSG.GET.{stream}", {"seq": sequence})
        return None if found is None else stored(found["message"])

    async def fit(self, spec: ConsumerSpec) -> bool:
        """Give the consumer `spec`'s max_ack_pending and ack wait, if it's there; whether that changed it."""
        where = f"{spec.stream}.{spec.durable}"
        info = await self.call(f"CONSUMER.INFO.{where}")
        wanted = {"max_ack_pending": spec.max_ack_pending, "ack_wait": int(spec.ack_wait_seconds * _NANOSECONDS)}
        if info is None or all(info["config"].get(key) == value for key, value in wanted.items()):
            return False
        await self.call(f"CONSUMER.CREATE.{where}", {"stream_name": spec.stream, "config": info["config"] | wanted})
        return True

    async def last(self, stream: str, subject: str) -> bytes | None:
        """The data of the subject's last message; None where there is none."""
        found = await self.call(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
        return None if found is None else base64.b64decode(found["message"].get("data", ""))
