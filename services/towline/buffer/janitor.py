"""The buffer's janitor: purges what no restart, audit of the open part, or reader can need, as floors.py computes it.

It runs beside the leader and not inside its loop, since a full CONTROL stops the loop and room is what ends that. Floors only
rise, so a fenced buffer's janitor purges nothing that its successor needs. Nothing is purged while buffer.keep_history is on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import structlog

from towline.buffer.far import Taken
from towline.buffer.floors import Floors, floors
from towline.buffer.state import State
from towline.buffer.unscored import first_unscored
from towline.bus.client import Bus
from towline.bus.read import Unfetched
from towline.bus.sites import GATHERED
from towline.bus.topology import CONTROL, DEAD, OUTCOME, TRAJECTORY, StreamSpec
from towline.bus.wire import BLOB_HEADER, NOT_FOUND, ApiError
from towline.contract.control import SnapshotRecord, decode_control
from towline.errors import CorruptError, MissingError, UnavailableError, UsageError
from towline.store import keys
from towline.store.blobs import Blobs
from towline.store.objects import ObjectStore

JANITOR_SECONDS = 10.0
"""Between sweeps."""
CATCH_UP_SECONDS = 30.0
"""How long a sweep waits for the state to know every outcome that stood at its start."""
_POLL_SECONDS = 0.05


class Janitor:
    """`run` until cancelled; `sweep` once. `swept` is what the last sweep left as the streams' first sequences."""

    def __init__(
        self, bus: Bus, objects: ObjectStore, state: Callable[[], State], *, unscored_seconds: float | None = None
    ) -> None:
        """`unscored_seconds`: reward acknowledges trajectories before it scores them (`reward.scope = "group"`), and those of an
        external group are kept so long; None: it never does."""
        self.swept: Floors | None = None
        self.blobs_deleted = 0
        self._bus = bus
        self._objects = objects
        self._run = bus.topology.run
        self._blobs = Blobs(objects, self._run)
        self._state = state
        self._unscored_seconds = unscored_seconds
        self.taken = Taken(bus)
        """What the sites may purge in turn (far.py): said before it goes here, so that a crash in between only repeats it."""
        self._readable = b""
        self._say = structlog.get_logger("towline.buffer.janitor")

    async def run(self) -> None:
        while True:
            try:
                await self.sweep()
            except (UnavailableError, MissingError) as error:
                self._say.warning("sweep_put_off", reason=error.message)
            await asyncio.sleep(JANITOR_SECONDS)

    @property
    def control_floor(self) -> int:
        """The first sequence of CONTROL that the last sweep left."""
        return self.swept.control if self.swept is not None else 1

    async def sweep(self) -> Floors | None:
        """Purge up to the floors; None where they can't be known now."""
        reward_floor = await self._reward_floor()
        known = (await self._bus.stream_state(OUTCOME)).last_sequence
        snapshot = await self._snapshot()
        if snapshot is None or not await self._caught_up(known):
            return None
        found = floors(self._state(), covers=snapshot.covers, outcome_cursor=snapshot.outcome_cursor, reward_floor=reward_floor)
        if self._unscored_seconds is not None:
            found = replace(found, trajectory=await self._first_unscored(found.trajectory))
        await self._purge(TRAJECTORY, found.trajectory)
        await self._purge(OUTCOME, found.outcome)
        await self._purge(CONTROL, found.control)
        self.swept = found
        return found

    async def _first_unscored(self, below: int) -> int:
        assert self._unscored_seconds is not None
        first = (await self._bus.stream_state(TRAJECTORY)).first_sequence
        return await first_unscored(self._bus, self._state(), first, below, self._unscored_seconds) if first < below else below

    async def _reward_floor(self) -> int | None:
        spec = self._bus.topology.reward_consumer()
        try:
            info = await self._bus.jetstream.call("look at reward's consumer", f"CONSUMER.INFO.{spec.stream}.{spec.durable}")
        except ApiError as error:
            if error.code == NOT_FOUND:
                return None
            raise error.translated("look at reward's consumer") from None
        return int(info["ack_floor"]["stream_seq"])

    async def _snapshot(self) -> SnapshotRecord | None:
        """The newest one, if its blob can be read back: nothing is purged on the word of one that can't."""
        message = await self._bus.last(CONTROL, self._bus.topology.control("snapshot"))
        record = None if message is None else decode_control(message.data)
        if not isinstance(record, SnapshotRecord):
            return None
        if record.blob != self._readable:
            try:
                await asyncio.to_thread(self._blobs.get, record.blob)
            except (MissingError, CorruptError) as error:
                self._say.error("snapshot_unreadable", reason=error.message, covers=record.covers)
                return None
            self._readable = record.blob
        return record

    async def _caught_up(self, outcome_sequence: int) -> bool:
        for _ in range(round(CATCH_UP_SECONDS / _POLL_SECONDS)):
            if self._state().outcome_sequence >= outcome_sequence:
                return True
            await asyncio.sleep(_POLL_SECONDS)
        return False

    async def _purge(self, spec: StreamSpec, floor: int) -> None:
        stream, first = self._bus.topology.stream(spec), (await self._bus.stream_state(spec)).first_sequence
        if floor <= first:
            return
        await self._delete_blobs(spec, first, floor)
        if spec in GATHERED:
            await self.taken.note(spec, first, floor)
        try:
            await self._bus.jetstream.call(f"purge {stream}", f"STREAM.PURGE.{stream}", {"seq": floor})
        except ApiError as error:
            raise error.translated(f"purge {stream}") from None
        self._say.info("purged", stream=spec.key, below=floor, messages=floor - first)

    async def _delete_blobs(self, spec: StreamSpec, first: int, floor: int) -> None:
        """The payloads of the messages that go, first: a crash in between finds the messages again and repeats this.

        DEAD may keep one's bytes under the same name; those stay.
        """
        if await self._few_blobs():
            return
        names = {name async for name in self._names(spec, first, floor)}
        if names:
            names -= {name async for name in self._names(DEAD, 1, None)}
        for name in names:
            try:
                await asyncio.to_thread(self._objects.delete, keys.blob(self._run, bytes.fromhex(name)))
            except UsageError as error:  # this role may not delete: the store's gc has to
                self._say.warning("blob_stays", blob=name, reason=error.message)
                return
            self.blobs_deleted += 1

    async def _few_blobs(self) -> bool:
        """Whether there is no blob but the newest snapshot's: the streams needn't be read then."""

        def look() -> bool:
            found = self._objects.list(keys.blob(self._run, b""))
            return all(info.key.endswith(self._readable.hex()) for info in found)

        return await asyncio.to_thread(look)

    async def _names(self, spec: StreamSpec, first: int, floor: int | None) -> AsyncGenerator[str, None]:
        """The blobs that the messages [first, floor) name: payloads, and the states of snapshot records."""
        stream = self._bus.topology.stream(spec)
        reader = Unfetched(self._bus.jetstream, stream, None, start=first, follow=False)
        async with contextlib.aclosing(reader.messages()) as messages:
            async for message in messages:
                if floor is not None and message.sequence >= floor:
                    return
                if BLOB_HEADER in message.headers:
                    yield message.headers[BLOB_HEADER]
                elif spec is CONTROL and message.subject == self._bus.topology.control("snapshot"):
                    record = decode_control(message.data)
                    if isinstance(record, SnapshotRecord) and record.blob != self._readable:
                        yield record.blob.hex()
