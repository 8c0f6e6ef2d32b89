"""Where a run is read from: its live streams and store, or a bundle. Whatever replays or explains a run reads a `Source`.

A source only reads. Its LOG is read to the head, and its streams end where they ended when it was opened.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Protocol

from towline.bundle.manifest import StreamRecord
from towline.bus.client import Bus, Message
from towline.bus.topology import ACKS, StreamSpec, Topology
from towline.config import Settings
from towline.contract.policy import Ack, decode_ack
from towline.errors import MalformedError
from towline.store.log import Log
from towline.store.objects import ObjectStore


class Source(Protocol):
    """A run to read. Subjects are full ones; `*` and a closing `>` stand for tokens as on the bus."""

    @property
    def where(self) -> str:
        """For messages to people."""
        ...

    @property
    def settings(self) -> Settings: ...

    @property
    def objects(self) -> ObjectStore: ...

    @property
    def log(self) -> Log: ...

    @property
    def topology(self) -> Topology: ...

    def read(self, spec: StreamSpec, *, start: int = 1, subjects: Sequence[str] | None = None) -> AsyncGenerator[Message, None]:
        """The messages from sequence `start` on, in order. A reader that stops early closes it (`contextlib.aclosing`)."""
        ...

    async def get_many(self, spec: StreamSpec, sequences: Sequence[int]) -> list[Message | None]:
        """The messages at `sequences`, in their order; None for each that isn't there."""
        ...

    async def last(self, spec: StreamSpec, subject: str) -> Message | None:
        """The last message on one subject."""
        ...

    async def state(self, spec: StreamSpec) -> StreamRecord:
        """Where the stream begins and ends."""
        ...

    async def acks(self) -> list[Ack]:
        """The last ack of each replica, by name."""
        ...


class BusSource:
    """A live or stopped run, from its bus and its store; `open` reads the LOG."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: Settings, log: Log) -> None:
        self.bus = bus
        self.objects = objects
        self.settings = settings
        self.log = log

    @classmethod
    async def open(cls, bus: Bus, objects: ObjectStore, settings: Settings) -> BusSource:
        log = Log(objects, settings.run.name)
        await asyncio.to_thread(log.refresh)
        return cls(bus, objects, settings, log)

    @property
    def where(self) -> str:
        return f"run {self.settings.run.name}"

    @property
    def topology(self) -> Topology:
        return self.bus.topology

    async def read(
        self, spec: StreamSpec, *, start: int = 1, subjects: Sequence[str] | None = None
    ) -> AsyncGenerator[Message, None]:
        async with contextlib.aclosing(self.bus.read(spec, start=start, subjects=subjects, follow=False)) as messages:
            async for message in messages:
                yield message

    async def get_many(self, spec: StreamSpec, sequences: Sequence[int]) -> list[Message | None]:
        return await self.bus.get_many(spec, sequences)

    async def last(self, spec: StreamSpec, subject: str) -> Message | None:
        return await self.bus.last(spec, subject)

    async def state(self, spec: StreamSpec) -> StreamRecord:
        found = await self.bus.stream_state(spec)
        return StreamRecord(
            created_at=found.created_at, first=found.first_sequence, last=found.last_sequence, messages=found.messages
        )

    async def acks(self) -> list[Ack]:
        return decode_acks((await self.bus.kv(ACKS).items()).values())


def decode_acks(values: Iterable[bytes]) -> list[Ack]:
    """Those that can be read, by replica: an ack is told to people, nothing is decided by it."""
    found = []
    for value in values:
        with contextlib.suppress(MalformedError):
            found.append(decode_ack(value))
    return sorted(found, key=lambda ack: ack.replica)


def matcher(subjects: Sequence[str] | None) -> Callable[[str], bool]:
    """Whether a subject is one of `subjects`, by the bus's rules; None matches all."""
    if subjects is None:
        return lambda subject: True
    plain = {subject for subject in subjects if "*" not in subject and not subject.endswith(">")}
    patterns = [subject.split(".") for subject in subjects if subject not in plain]

    def matches(subject: str) -> bool:
        return subject in plain or (bool(patterns) and any(_fits(subject.split("."), pattern) for pattern in patterns))

    return matches


def _fits(tokens: list[str], pattern: list[str]) -> bool:
    if pattern[-1] == ">":
        pattern = pattern[:-1]
        if len(tokens) <= len(pattern):
            return False
        tokens = tokens[: len(pattern)]
    return len(tokens) == len(pattern) and all(want in ("*", token) for token, want in zip(tokens, pattern, strict=True))
