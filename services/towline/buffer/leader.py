"""One buffer's leadership: rebuild the state, take CONTROL over, then decide, append and apply, over and over.

Everything happens in one loop, so that no outcome is taken in between a decision and its record. OUTCOME and the LOG are read
beside it and wait in line; the LOG's entries enter the lineage only here, so that each decision sees one lineage throughout.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from itertools import islice
from typing import Any, NoReturn

import structlog
from msgspec import UNSET, UnsetType

from towline import faults, spans
from towline.buffer.decide import decide, unknown_versions
from towline.buffer.dump import encode_state
from towline.buffer.far import FarKeeper
from towline.buffer.figures import waiting_for
from towline.buffer.fleet import Fleet
from towline.buffer.floors import RETAINED_CHECKPOINTS, final_depth
from towline.buffer.janitor import Janitor
from towline.buffer.leftovers import Leftovers
from towline.buffer.prompting import load_run
from towline.buffer.records import Chunk, chunks
from towline.buffer.regression import StreamWatch, check_control, mend
from towline.buffer.replay import apply_outcome, read_control, read_outcomes, rebuild
from towline.buffer.requests import Requests
from towline.buffer.rules import Rules
from towline.buffer.state import State
from towline.buffer.traces import Traces
from towline.buffer.view import Sources, Unit, View
from towline.buffer.waiting import Waiting
from towline.bus.client import Bus, Message
from towline.bus.control_log import ControlLog
from towline.bus.topology import CONTROL, OUTCOME
from towline.config import Settings
from towline.contract.control import EndRecord, SnapshotRecord, TaskRecord
from towline.contract.entries import VersionEntry
from towline.errors import ConflictError, InvariantError, UnavailableError
from towline.runtime.halves import check_store_as_new
from towline.store.blobs import Blobs
from towline.store.checkpoints import newest_on
from towline.store.lineage import Lineage
from towline.store.log import Log
from towline.store.objects import ObjectStore

LOG_POLL_SECONDS = 0.5
"""How often the LOG is read where no hint comes."""
FLEET_SECONDS = 1.0
"""How often the registry is read and the named state looked at."""
TICK_SECONDS = 0.25
"""How long the loop sleeps where nothing wakes it: deadlines are seen within this time."""
OUTCOMES_AT_A_TIME = 4096
MOST_OUTCOMES_WAITING = 16384
TAKE_OVER_TRIES = 20
FULL = 0.98
"""Share of a stream's bytes from which on it's said to be full: a message or two may still fit."""
SNAPSHOT_FILL = 0.5
"""Share of CONTROL's bytes from which on a snapshot is taken at every look, so that the janitor can make room."""
_MORE_ROOM = "raise bus.budget_bytes, free the server's disk, or set buffer.keep_history = false"

Tell = Callable[[str], None]


class Leader:
    """`lead` until it raises or `draining` is set. `tell` hears the named state; `state` and `lineage` are there to look at."""

    def __init__(self, settings: Settings, bus: Bus, objects: ObjectStore, tell: Tell) -> None:
        self.state = State()
        self.lineage = Lineage()
        self.fleet = Fleet(bus, settings.rollout.ack_wait_seconds, settings.buffer.site_silent_seconds)
        self.janitor = Janitor(
            bus, objects, lambda: self.state,
            unscored_seconds=settings.buffer.group_deadline_seconds if settings.reward.scope == "group" else None,
        )  # fmt: skip
        self.far = FarKeeper(
            bus, lambda: self.state, lambda: self.fleet.presence, self.janitor.taken, lambda: self.janitor.control_floor,
            ack_wait_seconds=settings.rollout.ack_wait_seconds, keep_history=settings.buffer.keep_history,
        )  # fmt: skip
        self.leftovers = Leftovers(bus, lambda: self.state)
        self.finished = False
        self._settings = settings
        self._bus = bus
        self._objects = objects
        self._blobs = Blobs(objects, settings.run.name)
        self._tell = tell
        self._log = Log(objects, settings.run.name)
        self._control = ControlLog(bus, "", on_full=self._on_full)
        self._run: tuple[Rules, Sources] | None = None
        self._outcomes: deque[Message] = deque()
        self._room = asyncio.Event()
        self._wake = asyncio.Event()
        self._poll = asyncio.Event()
        self._looked_at = 0.0
        self.requests = Requests(bus, self._wake.set)
        self._snapshot_at = 0
        self._snapshot_due = False
        self._watch = StreamWatch(bus)
        self._suspect = False
        """TRAJECTORY or OUTCOME has lost messages: what is open has to be looked over."""
        self._waiting = Waiting()
        self._traces: Traces | None = None
        self._say = structlog.get_logger("towline.buffer")

    async def lead(self, draining: asyncio.Event) -> None:
        """`FencedError` when another buffer took over. `UnavailableError`: call again, everything is read anew."""
        self._tell("replaying: reading CONTROL and OUTCOME")
        await check_store_as_new(self._bus, self._log)
        await self._take_over()
        if spans.tracer is not None:
            born = (await self._bus.stream_state(CONTROL)).created_at
            self._traces = Traces(spans.tracer, self._settings.run.name, str(born))
        await self._read_log()
        self._take_entries()
        await check_control(self._bus, self.state, self.lineage, _batch_cursor(self._log))
        whole = await read_outcomes(self._bus, self.state)
        if self._suspect or not whole:
            self._tell("replaying: a stream has lost messages; looking for what is open in it")
            await mend(self._bus, self.state)
            self._suspect = False
        self._outcomes.clear()
        self._room.set()
        self._say.info(
            "leading", writer=self._control.writer_id, control=self.state.control_sequence, outcome=self.state.outcome_sequence
        )
        self.requests = Requests(self._bus, self._wake.set)
        parts = [self._outcome_reader(), self._log_reader(), self._hint_reader(), self.requests.read(), *self._janitors()]
        readers = [asyncio.create_task(part, name="buffer-reader") for part in parts]
        try:
            while not draining.is_set():
                for reader in readers:
                    if reader.done():
                        reader.result()
                self._wake.clear()
                await self.tick()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_SECONDS):
                        await self._wake.wait()
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            await self.fleet.close()

    async def tick(self) -> None:
        """Take in what has come, then decide until there is nothing to decide."""
        await self._take_outcomes()
        self._take_entries()
        if unknown_versions(self.state, self.lineage):
            await self._read_log()
            self._take_entries()
        view = await self._view()
        if view is None:
            return
        if time.monotonic() - self._looked_at >= FLEET_SECONDS:
            await self._look_around(view)
            view = self._at(time.time())  # with the sites' slots as they are now: a run's first groups are many
        while units := decide(view):
            await self._append(units)
            view = self._at(time.time())
        if view.goal is None and (asked := await self.requests.decide(self.state)) is not None:
            await self._append([(asked,)])
            self._wake.set()
        self._see_end(view)
        records = self.state.control_sequence - self._snapshot_at
        if records >= self._settings.buffer.snapshot_every_records or (self._snapshot_due and records > 1):
            await self._snapshot()

    def _janitors(self) -> Iterator[Coroutine[Any, Any, None]]:
        yield self.leftovers.run()
        if self._bus.topology.sites:
            yield self.far.run()
        if not self._settings.buffer.keep_history:
            yield self.janitor.run()

    # taking over

    async def _take_over(self) -> None:
        """The state to CONTROL's end, with our own writer record as the last."""
        self._control = ControlLog(self._bus, secrets.token_hex(6), on_full=self._on_full)
        self.state = await rebuild(self._bus, self._blobs)
        self._snapshot_at = self.state.control_sequence
        for _ in range(TAKE_OVER_TRIES):
            self._control.last_sequence = self.state.control_sequence
            faults.point("buffer.before_writer")
            try:
                await self._control.take_over()
            except ConflictError:
                await read_control(self._bus, self.state)
                continue
            faults.point("buffer.writer_appended")
            await read_control(self._bus, self.state)
            return
        raise UnavailableError("CONTROL is being written by another buffer all the time", code="take_over")

    # what comes in

    async def _outcome_reader(self) -> NoReturn:
        async with contextlib.aclosing(self._bus.read(OUTCOME, start=self.state.outcome_sequence + 1)) as messages:
            try:
                async for message in messages:
                    self._outcomes.append(message)
                    self._wake.set()
                    if len(self._outcomes) >= MOST_OUTCOMES_WAITING:
                        self._room.clear()
                        await self._room.wait()
            except InvariantError as error:
                self._suspect = True
                raise UnavailableError(f"{error.message}: everything is read anew", code=error.code) from None
        raise UnavailableError("OUTCOME's reader ended", code="reader_ended")

    async def _log_reader(self) -> NoReturn:
        while True:
            with contextlib.suppress(UnavailableError):  # asked again; meanwhile what stands is decided on what is known
                await self._read_log()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOG_POLL_SECONDS):
                    await self._poll.wait()
            self._poll.clear()

    async def _hint_reader(self) -> NoReturn:
        async for _ in self._bus.subscribe_hints("opened", "committed"):
            self._poll.set()
        raise UnavailableError("the hints ended", code="reader_ended")

    async def _read_log(self) -> None:
        """Entries that this reads wait until the loop takes them in."""
        if await asyncio.to_thread(self._log.refresh):
            self._wake.set()

    def _take_entries(self) -> None:
        while self.lineage.next_number < self._log.next_number:
            self.lineage.extend(self._log.entry(self.lineage.next_number))

    async def _take_outcomes(self) -> None:
        for _ in range(min(len(self._outcomes), OUTCOMES_AT_A_TIME)):
            message = self._outcomes.popleft()
            if self._traces is not None:
                self._traces.take(message)
            fault = apply_outcome(self.state, message.data, message.sequence)
            if fault is not None:
                self._say.warning("outcome_malformed", sequence=message.sequence, reason=fault)
                with contextlib.suppress(UnavailableError):  # it stays in OUTCOME all the same
                    await self._bus.dead("outcome", message.data, fault, sequence=message.sequence, subject=message.subject)
        if self._outcomes:
            self._wake.set()
        if len(self._outcomes) < MOST_OUTCOMES_WAITING:
            self._room.set()

    # deciding

    async def _view(self) -> View | None:
        if 0 not in self.lineage:
            self._tell("no_base_model: the LOG has no entry 0; the trainer writes it")
            return None
        if self._run is None:
            self._run = await asyncio.to_thread(load_run, self._settings, self._objects, self._log)
        return self._at(time.time())

    def _at(self, now: float) -> View:
        assert self._run is not None
        return View(self.state, self.lineage, *self._run, now, self.fleet.presence)

    async def _append(self, units: list[Unit]) -> None:
        for version in _eval_versions(units):
            await self.fleet.prepare(version)
        for chunk in chunks(units, self._bus.topology, self._control.stamp):
            for kind in chunk.kinds:
                faults.point(f"buffer.before_{kind}")
            sequences = await self._append_chunk(chunk)
            for kind in chunk.kinds:
                faults.point(f"buffer.{kind}_appended")
            for record, sequence in zip(chunk.records, sequences, strict=True):
                self.state.apply(record, sequence)
                if not isinstance(record, TaskRecord):
                    self._say.debug("appended", kind=type(record).__name__, sequence=sequence)

    async def _append_chunk(self, chunk: Chunk) -> list[int]:
        if self._traces is None:
            return await self._control.append_atomic(chunk.messages)
        traced = self._traces.begin(chunk)
        try:
            sequences = await self._control.append_atomic(chunk.messages, traced.headers)
        except BaseException as error:
            traced.end(error)
            raise
        traced.end()
        return sequences

    async def _snapshot(self) -> None:
        """The state as a blob and the record that names it. A store that is away only puts it off."""
        data, covers, cursor = encode_state(self.state), self.state.control_sequence, self.state.outcome_sequence
        self._snapshot_at, self._snapshot_due = covers, False
        floor_depth: int | UnsetType = UNSET
        if not self._settings.buffer.keep_history:
            lineage = self._log.lineage
            retained = islice(newest_on(self._log), RETAINED_CHECKPOINTS)
            floor_depth = final_depth([lineage.depth(version) for version, _ in retained])
        faults.point("buffer.snapshot_due")
        try:
            blob = await asyncio.to_thread(self._blobs.put, data)
        except UnavailableError as error:
            self._say.warning("snapshot_put_off", reason=error.message)
            return
        await self._append(
            [(SnapshotRecord(writer="", blob=blob, covers=covers, outcome_cursor=cursor, floor_depth=floor_depth),)]
        )
        self._say.info("snapshot", nbytes=len(data), covers=covers, outcome_cursor=cursor)

    # what is said

    async def _look_around(self, view: View) -> None:
        self._looked_at = time.monotonic()
        await self._look_at_streams()
        await self.fleet.refresh(self.state.open_eval)
        self._waiting.look(view)
        waiting = waiting_for(view, self.fleet, batch_waits_seconds=self._waiting.batch_seconds)
        self._tell(self._no_room() or waiting or self.far.trouble)

    def waiting(self) -> dict[str, float]:
        """waiting.py's figures."""
        return self._waiting.figures(self.state)

    @property
    def looks(self) -> Counter[str]:
        return self._waiting.looks

    async def _look_at_streams(self) -> None:
        """`UnavailableError` where TRAJECTORY or OUTCOME lost messages, so that everything is read anew and mended."""
        lost = await self._watch.look()
        if lost:
            self._suspect = True
            names = ", ".join(spec.key for spec in lost)
            raise UnavailableError(f"{names} lost messages; what is open is looked over", code="stream_regressed")
        if not self._settings.buffer.keep_history and self._watch.fill[CONTROL.key] > SNAPSHOT_FILL:
            self._snapshot_due = True  # the janitor needs one to make room

    def _no_room(self) -> str:
        full = [key for key, share in self._watch.fill.items() if share >= FULL]
        return f"bus_full: {', '.join(full)} has no room; {_MORE_ROOM}" if full else ""

    def _see_end(self, view: View) -> None:
        finished = view.finished
        if finished != self.finished:
            self.finished = finished
            end: EndRecord | None = self.state.ended
            self._say.info("run_ended" if finished else "run_goes_on", depth=view.depth, reason=end.reason if end else None)
            self._looked_at = 0.0

    def _on_full(self, full: bool) -> None:
        if full:
            self._tell(f"bus_full: CONTROL has no room; {_MORE_ROOM}")
        else:
            self._looked_at = 0.0


def _batch_cursor(log: Log) -> int:
    """CONTROL sequence of the last batch that the line has consumed; 0 before the first."""
    entry = log.entry(log.lineage.latest) if 0 in log.lineage else None
    return entry.batch_cursor if isinstance(entry, VersionEntry) else 0


def _eval_versions(units: list[Unit]) -> Iterator[int]:
    """The versions whose lane needs a consumer before these are appended."""
    yield from dict.fromkeys(
        record.task.exact_version
        for unit in units
        for record in unit
        if isinstance(record, TaskRecord) and record.task.exact_version is not None
    )
