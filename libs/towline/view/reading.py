"""Reads a run on, bit by bit: each message once, in turns short enough that whoever shares the event loop isn't held up.

Nothing is read while nobody looks. Of OUTCOME only as much is read back as is kept; tasks and trajectories are fetched one by one
when somebody opens them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from towline.bundle.manifest import StreamRecord
from towline.bus.client import Message
from towline.bus.topology import CONTROL, DEAD, OUTCOME, TRAJECTORY, StreamSpec
from towline.contract.entries import OpenEntry, VersionEntry
from towline.contract.outcome import Failure, Score, decode_outcome
from towline.errors import InvariantError, MalformedError, TowlineError, UsageError
from towline.report.figures import FigureBook
from towline.store.log import Log
from towline.view.convergence import Convergence
from towline.view.decisions import BatchFound, Decisions, consumed, subjects
from towline.view.feed import Feed, Now
from towline.view.letters import Letter, letter_of
from towline.view.samples import KEPT, Consumed, SampleIndex

EVERY_SECONDS = 1.0
IDLE_SECONDS = 20.0
"""After so long without a question the reading stops, until the next one."""
TURN_SECONDS = 0.005
REST = 2.0
"""A turn of t seconds is followed by a pause of REST * t: catching up takes a third of a core."""
MOST_LETTERS = 2000
MOST_FAILURES = 50_000
_log = structlog.get_logger("towline.view")


@dataclass(frozen=True, slots=True)
class Line:
    """The batches of the LOG's line by depth, and their sums. `staleness`: depths -> rows."""

    batches: list[BatchFound]
    staleness: Counter[int]
    rows: int
    policy_tokens: int


@dataclass(frozen=True, slots=True)
class Made:
    """What is told of a version again and again: the LOG itself keeps older entries compressed. `at`: seconds of Unix time."""

    at: float
    wire_bytes: int
    model_bytes: int
    skipped: tuple[int, ...]


class Reading:
    """What has been read of a feed. `run` it; `asked` whenever somebody wants to know."""

    def __init__(self, feed: Feed, *, kept: int = KEPT, clock: Callable[[], float] = time.time) -> None:
        self.feed = feed
        self._kept, self._clock = kept, clock
        self._asked_at = float("-inf")
        self._wanted = asyncio.Event()
        self.begun = asyncio.Event()
        """Something was read, or it's known why nothing is."""
        self._turn_began = 0.0
        self._reset()

    def _reset(self) -> None:
        self.revision = 0
        """Grows with everything that was read."""
        self.problem = ""
        """Why nothing more can be read at the moment."""
        self.caught_up = False
        self.now = Now(self._clock())
        self.samples = SampleIndex(self._kept)
        self.decisions = Decisions(self.samples)
        self.convergence = Convergence()
        self.book = FigureBook()
        self.letters: deque[Letter] = deque(maxlen=MOST_LETTERS)
        self.dead_by_stage: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        """Stage -> attempts, as far back as OUTCOME is read."""
        self.failed: OrderedDict[tuple[int, int], list[int]] = OrderedDict()
        """(group, sample) -> places of its failures in OUTCOME."""
        self._read: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._line: tuple[tuple[int, int], Line] = ((-1, -1), Line([], Counter(), 0, 0))
        self._consumed: tuple[tuple[int, int], Consumed] = ((-1, -1), Consumed({}, frozenset()))
        self._made: list[Made | None] = []
        """By number, None of what is no version but version 0."""
        self.epochs = 0

    @property
    def share(self) -> float:
        """Of what stands in the streams that are read: how much has been read."""
        ends = sum(self._ends.values())
        return min(sum(min(self._read.get(key, 0), end) for key, end in self._ends.items()) / ends, 1.0) if ends else 1.0

    def asked(self) -> None:
        self._asked_at = time.monotonic()
        self._wanted.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            if time.monotonic() - self._asked_at > IDLE_SECONDS:
                self._wanted.clear()
                await self._wanted.wait()
            await self.refresh()
            if not self.feed.live and self.caught_up:
                return
            await asyncio.sleep(EVERY_SECONDS)

    async def refresh(self) -> None:
        """Read on to where the run is now. What can't be read shows in `problem`."""
        try:
            await self._refresh()
            self.problem = ""
        except InvariantError as error:
            _log.warning("view_starts_again", reason=error.message)
            self._reset()
            self.problem = error.message
        except TowlineError as error:
            self.problem = error.message
        self.begun.set()

    async def _refresh(self) -> None:
        source = self.feed.source
        if not self.feed.follows_log:
            await asyncio.to_thread(source.log.refresh)
        await self._read_entries(source.log)
        now = await self.feed.now(self._clock())
        self.book.update(now.statuses)
        self.convergence.take(now.acks)
        self.now = now
        self.revision += 1
        states = {spec.key: await self._state(spec) for spec in (TRAJECTORY, OUTCOME, DEAD, CONTROL)}
        self._ends = {OUTCOME.key: states[OUTCOME.key].last, CONTROL.key: states[CONTROL.key].last}
        await self._on(DEAD, None, states[DEAD.key], self._letter)
        # Scores first: whatever a batch names was scored before it.
        await self._on(OUTCOME, None, states[OUTCOME.key], self._outcome, most=self._kept)
        await self._on(CONTROL, subjects(source.topology), states[CONTROL.key], self.decisions.take)
        self.decisions.settle()
        self.samples.seen(states[TRAJECTORY.key].last)
        self.caught_up = True
        self.revision += 1

    def consumed(self) -> Consumed:
        """What the line has consumed, as far as the LOG is read."""
        log = self.feed.source.log
        mark = (log.next_number, len(self._made))
        if self._consumed[0] != mark:
            skipped = [depth for made in self.made() for depth in made.skipped]
            self._consumed = mark, consumed(log.lineage, skipped)
        return self._consumed[1]

    def made(self) -> list[Made]:
        """The line's versions but version 0, oldest first, as far as the LOG is read."""
        lineage = self.feed.source.log.lineage
        path = lineage.path() if lineage.versions() else ()
        return [made for number in path if number < len(self._made) and (made := self._made[number]) is not None]

    async def _read_entries(self, log: Log) -> None:
        self._turn_began = time.monotonic()
        while (number := len(self._made)) < log.next_number:
            entry = log.entry(number)
            made = None
            if isinstance(entry, VersionEntry):
                made = Made(entry.at, entry.wire_bytes, entry.model_bytes, entry.skipped)
            self._made.append(made)
            self.epochs += isinstance(entry, OpenEntry)
            await self._rest()

    def line(self) -> Line:
        """As far as CONTROL and the LOG are read."""
        kept = self.decisions.batches
        mark = (self.decisions.taken, self.feed.source.log.next_number)
        if self._line[0] != mark:
            batches = self.decisions.line(self.feed.source.log.lineage, self.consumed().depths) if kept else []
            staleness: Counter[int] = Counter()
            for batch in batches:
                staleness.update(batch.point.staleness)
            rows, tokens = (sum(getattr(batch.point, name) for batch in batches) for name in ("rows", "policy_tokens"))
            self._line = mark, Line(batches, staleness, rows, tokens)
        return self._line[1]

    async def _state(self, spec: StreamSpec) -> StreamRecord:
        try:
            return await self.feed.source.state(spec)
        except UsageError:  # a bundle of an earlier release may lack one
            return StreamRecord(created_at="", first=0, last=0, messages=0)

    async def _on(
        self,
        spec: StreamSpec,
        wanted: Sequence[str] | None,
        state: StreamRecord,
        take: Callable[[Message], None],
        *,
        most: int | None = None,
    ) -> None:
        """Read on from where the last reading ended; the first goes back `most` messages, or to the beginning."""
        start = self._read.get(spec.key, 0 if most is None else max(state.last - most, 0)) + 1
        if state.last < start - 1:
            raise InvariantError(f"stream {spec.key} went backwards: it was read to {start - 1} and ends at {state.last}")
        if state.last >= start:
            async with contextlib.aclosing(self.feed.source.read(spec, start=start, subjects=wanted)) as messages:
                self._turn_began = time.monotonic()
                async for message in messages:
                    if message.sequence > state.last:
                        break
                    take(message)
                    self._read[spec.key] = message.sequence
                    await self._rest()
        self._read[spec.key] = max(state.last, start - 1)

    async def _rest(self) -> None:
        took = time.monotonic() - self._turn_began
        if took > TURN_SECONDS:
            self.decisions.settle()
            self.revision += 1
            self.begun.set()
            await asyncio.sleep(REST * min(took, 4 * TURN_SECONDS))
            self._turn_began = time.monotonic()

    def _outcome(self, message: Message) -> None:
        try:
            outcome = decode_outcome(message.data)
        except MalformedError:
            return  # it's in DEAD
        if isinstance(outcome, Score):
            self.samples.score(outcome, message.at, dropped=outcome.group in self.decisions.dropped)
        elif isinstance(outcome, Failure):
            self.failures[outcome.stage] += 1
            self.failed.setdefault((outcome.group, outcome.sample), []).append(message.sequence)
            while len(self.failed) > MOST_FAILURES:
                self.failed.popitem(last=False)

    def _letter(self, message: Message) -> None:
        if (letter := letter_of(message, self.feed.source.topology.relative)) is not None:
            self.letters.append(letter)
            self.dead_by_stage[letter.stage] += 1
