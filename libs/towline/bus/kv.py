"""A key-value bucket: the last value of each key, and compare-and-swap by revision. Reads are from the leader.

The layout is every NATS client's, so that `nats kv` shows it. Where a bucket has a TTL, an entry is gone that long after its
last write.
"""

from __future__ import annotations

import re

from towline.bus.jetstream import JetStream
from towline.bus.publish import Publisher
from towline.bus.read import OrderedReader
from towline.bus.wire import EXPECTED_LAST_OF_SUBJECT, WRONG_LAST_SEQUENCE, ApiError, Message, Stub, Unsettled
from towline.errors import UsageError

KEY = re.compile(r"[A-Za-z0-9_=/-]+(\.[A-Za-z0-9_=/-]+)*")
_OPERATION = "KV-Operation"


class Bucket:
    """A run's bucket; `name` is the server's name of it."""

    def __init__(self, jetstream: JetStream, publisher: Publisher, name: str) -> None:
        self._jetstream = jetstream
        self._publisher = publisher
        self.name = name
        self._stream = f"KV_{name}"

    async def get(self, key: str) -> bytes | None:
        """The key's value; None where it has none."""
        entry = await self.entry(key)
        return None if entry is None else entry[0]

    async def entry(self, key: str) -> tuple[bytes, int] | None:
        """The key's value and its revision; None where it has none."""
        message = await self._last(key)
        return None if message is None or _is_marker(message) else (message.data, message.sequence)

    async def put(self, key: str, value: bytes) -> int:
        """Set the value, whatever it was; the revision."""
        return await self._jetstream.patiently(f"put {key}", lambda: self._publisher.put(self._subject(key), Stub(value, {})))

    async def create(self, key: str, value: bytes) -> int | None:
        """Set the value where there is none; None where there is one."""
        standing = await self._last(key)
        if standing is None:
            return await self._swap(key, value, 0)
        return await self._swap(key, value, standing.sequence) if _is_marker(standing) else None

    async def update(self, key: str, value: bytes, revision: int) -> int | None:
        """Set the value where the last one has this revision; None where it hasn't. Values should differ from write to write,
        so that one's own is known again after a lost answer."""
        return await self._swap(key, value, revision)

    async def delete(self, key: str, revision: int | None = None) -> bool:
        """Take the value away, where it has this revision if one is given; False where it hasn't."""
        headers = {_OPERATION: "DEL"}
        if revision is None:
            await self._jetstream.patiently(f"delete {key}", lambda: self._publisher.put(self._subject(key), Stub(b"", headers)))
            return True
        return await self._swap(key, b"", revision, headers) is not None

    async def items(self) -> dict[str, bytes]:
        """All keys with their values, each as it stood at some moment of the call; none is missing that had one all along."""
        everything = [f"$KV.{self.name}.>"]
        reader = OrderedReader(self._jetstream, self._stream, None, subjects=everything, follow=False, last_per_subject=True)
        found: dict[str, Message] = {}
        async for message in reader.messages():
            found[message.subject] = message
        # A key that was written during the reading left its place for one behind the reading's end.
        for subject in await self._jetstream.subjects(self._stream, everything[0]) - found.keys():
            message_now = await self._jetstream.get_from_leader(self._stream, {"last_by_subj": subject})
            if message_now is not None:
                found[subject] = message_now
        prefix = f"$KV.{self.name}."
        return {subject.removeprefix(prefix): m.data for subject, m in found.items() if not _is_marker(m)}

    async def _swap(self, key: str, value: bytes, revision: int, headers: dict[str, str] | None = None) -> int | None:
        stub = Stub(value, headers or {})
        condition = {EXPECTED_LAST_OF_SUBJECT: str(revision)}
        doubtful = False

        async def attempt() -> int | None:
            nonlocal doubtful
            try:
                return await self._publisher.put(self._subject(key), stub, condition)
            except Unsettled:
                doubtful = True
                raise
            except ApiError as error:
                if error.err_code not in WRONG_LAST_SEQUENCE:
                    raise
                if not doubtful:
                    return None
            standing = await self._last(key)
            own = standing is not None and standing.sequence > revision and standing.data == value
            return standing.sequence if own and standing is not None else None

        return await self._jetstream.patiently(f"update {key}", attempt)

    async def _last(self, key: str) -> Message | None:
        return await self._jetstream.get_from_leader(self._stream, {"last_by_subj": self._subject(key)})

    def _subject(self, key: str) -> str:
        if not KEY.fullmatch(key):
            raise UsageError(f"key {key!r}: use letters, digits, '_', '-', '=', '/' and dots between them", code="kv_key")
        return f"$KV.{self.name}.{key}"


def _is_marker(message: Message) -> bool:
    """Whether it says that the key has no value: deleted, or expired with a marker."""
    return _OPERATION in message.headers or "Nats-Marker-Reason" in message.headers
