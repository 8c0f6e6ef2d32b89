"""A source of one sample's records alone: `trace` reads them as it would the whole run, so there's one way to tell a life."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from towline.bundle.manifest import StreamRecord
from towline.bundle.source import Source, matcher
from towline.bus.client import Message
from towline.bus.topology import CONTROL, DEAD, OUTCOME, TRAJECTORY, StreamSpec, Topology
from towline.config import Settings
from towline.contract.outcome import decode_outcome
from towline.contract.policy import Ack
from towline.contract.trajectory import decode_trajectory
from towline.errors import MalformedError, MissingError
from towline.store.log import Log
from towline.store.objects import ObjectStore
from towline.view.reading import Reading

MOST_SAMPLES = 256
"""Of a group: so many scores are fetched."""
_AT_A_TIME = 16


class NarrowSource:
    """`of` makes one. Its streams hold what concerns the sample and little else."""

    def __init__(self, source: Source, acks: list[Ack], kept: dict[str, list[Message]]) -> None:
        self._source, self._acks, self._kept = source, acks, kept

    @classmethod
    async def of(cls, reading: Reading, group: int, sample: int) -> NarrowSource:
        """`MissingError` where nothing is known of the sample."""
        source = reading.feed.source
        topology = source.topology
        trajectory = await source.last(TRAJECTORY, topology.trajectory(group, sample))
        tasks, size = _of_trajectory(trajectory)
        scores = await _last(
            source, OUTCOME, [topology.score(group, one) for one in range(min(max(size, sample + 1), MOST_SAMPLES))]
        )
        failures = await source.get_many(OUTCOME, reading.failed.get((group, sample), []))
        outcomes = sorted((one for one in (*scores, *failures) if one is not None), key=lambda one: one.sequence)
        tasks += _tasks_of(failures)
        places = reading.decisions.concerning(group, None if trajectory is None else trajectory.sequence, tasks)
        control = [one for one in await source.get_many(CONTROL, places) if one is not None]
        letters = [one.sequence for one in reading.letters if one.context.get("subject") == topology.trajectory(group, sample)]
        dead = [one for one in await source.get_many(DEAD, letters) if one is not None]
        if trajectory is None and not control and not outcomes:
            raise MissingError(f"{source.where} knows no sample {group}.{sample}", code="sample_missing")
        return cls(source, reading.now.acks, {CONTROL.key: control, OUTCOME.key: outcomes, DEAD.key: dead})

    @property
    def where(self) -> str:
        return self._source.where

    @property
    def settings(self) -> Settings:
        return self._source.settings

    @property
    def objects(self) -> ObjectStore:
        return self._source.objects

    @property
    def log(self) -> Log:
        return self._source.log

    @property
    def topology(self) -> Topology:
        return self._source.topology

    async def read(
        self, spec: StreamSpec, *, start: int = 1, subjects: Sequence[str] | None = None
    ) -> AsyncGenerator[Message, None]:
        matches = matcher(subjects)
        for message in self._kept.get(spec.key, ()):
            if message.sequence >= start and matches(message.subject):
                yield message

    async def get_many(self, spec: StreamSpec, sequences: Sequence[int]) -> list[Message | None]:
        return await self._source.get_many(spec, sequences)

    async def last(self, spec: StreamSpec, subject: str) -> Message | None:
        return await self._source.last(spec, subject)

    async def state(self, spec: StreamSpec) -> StreamRecord:
        return await self._source.state(spec)

    async def acks(self) -> list[Ack]:
        return self._acks


def _of_trajectory(message: Message | None) -> tuple[list[int], int]:
    """Its task's place in CONTROL and its group's size; nothing where it can't be had."""
    if message is None:
        return [], 0
    try:
        found = decode_trajectory(message.data)
    except MalformedError:
        return [], 0
    return ([found.task_sequence] if found.task_sequence else []), found.group_size


def _tasks_of(failures: Sequence[Message | None]) -> list[int]:
    """Places in CONTROL of the tasks that failed."""
    found = []
    for message in failures:
        with contextlib.suppress(MalformedError):
            if message is not None:
                found.append(decode_outcome(message.data).task_sequence)
    return found


async def _last(source: Source, spec: StreamSpec, wanted: Sequence[str]) -> list[Message | None]:
    gate = asyncio.Semaphore(_AT_A_TIME)

    async def one(subject: str) -> Message | None:
        async with gate:
            return await source.last(spec, subject)

    return list(await asyncio.gather(*[one(subject) for subject in wanted]))
