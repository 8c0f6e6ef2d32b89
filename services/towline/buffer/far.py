"""What home's buffer does at a site, over the site's connection: takes away there what nobody needs, and fits its lane.

A site decides nothing, so what may go there follows from home's state. Of the site's own streams goes what home has taken in and
has purged itself, or of DEAD what home has taken in: its sequence at the site stands in home's message. But a site that lost its
disk counts from 1 again, and one that lost its last writes gives their numbers to others. So a look comes first at whether the
site has under its numbers what home took in (tails.py), and nothing goes that this look hasn't found the same. Of its copy of
CONTROL goes what home's has purged. A copy that lost its last records never gets them: samples that only they told of are issued
again. While the line is cut nothing goes, and nothing needs to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import structlog

from towline.buffer.leftovers import is_closed
from towline.buffer.presence import Presence
from towline.buffer.state import State
from towline.buffer.tails import IN_FLIGHT, Compared, Regressed, Spec, Tails
from towline.bus.across import Across
from towline.bus.client import Bus
from towline.bus.origins import Way, origins
from towline.bus.sites import GATHERED
from towline.bus.topology import CONTROL, DEAD, OUTCOME, PARTIAL, TRAJECTORY, StreamSpec
from towline.contract.outcome import decode_outcome
from towline.contract.task import TRAIN
from towline.errors import InvariantError, MalformedError, MissingError, UnavailableError, UsageError

FAR_SECONDS = 10.0
"""Between rounds."""


class Taken:
    """What of each site's streams home has taken in and needs no more: the highest sequence there, of each way."""

    def __init__(self, bus: Bus) -> None:
        self.tails = Tails(bus)
        self._bus = bus
        self._newest: dict[tuple[str, StreamSpec, Way], int] = {}

    async def note(self, spec: StreamSpec, start: int, end: int | None = None) -> int:
        """Home's messages [start, end) of the stream are needed no more; the first sequence that wasn't looked at."""
        sites = self._bus.topology.sites
        if not sites:
            return start
        stream, after = self._bus.topology.stream(spec), start
        async with contextlib.aclosing(origins(self._bus.jetstream, stream, sites, start=start, end=end)) as messages:
            async for message, origin in messages:
                after = message.sequence + 1
                self.tails.note(stream, message, origin)
                if origin is not None:
                    key = origin.site, spec, origin.way
                    self._newest[key] = max(self._newest.get(key, 0), origin.sequence)
        return after

    def of(self, site: str, spec: StreamSpec, way: Way) -> int:
        """0 where nothing is known."""
        found = (sequence for key, sequence in self._newest.items() if key[:2] == (site, spec) and key[2].fits(way))
        return max(found, default=0)


class FarKeeper:
    """`run` until cancelled; `round` once. `control_floor`: the first sequence that home's CONTROL keeps."""

    def __init__(
        self,
        bus: Bus,
        state: Callable[[], State],
        presence: Callable[[], Presence],
        taken: Taken,
        control_floor: Callable[[], int],
        *,
        ack_wait_seconds: float,
        keep_history: bool,
    ) -> None:
        self._bus = bus
        self._names = bus.topology
        self._state, self._presence = state, presence
        self._taken, self._control_floor = taken, control_floor
        self._tails = taken.tails
        self._ack_wait_seconds = ack_wait_seconds
        self._keep_history = keep_history
        self._dead_next = 1
        self._met: set[str] = set()
        self._away: set[str] = set()
        self._troubles: dict[tuple[str, str], str] = {}
        self._say = structlog.get_logger("towline.buffer.far")

    @property
    def trouble(self) -> str:
        """A named state, `name: what it means`, as the last round found it; empty where every site is what it was."""
        return next(iter(self._troubles.values()), "")

    async def run(self) -> None:
        while True:
            await self.round()
            await asyncio.sleep(FAR_SECONDS)

    async def round(self) -> None:
        """All that can be done at the sites that answer."""
        if not self._keep_history:
            try:
                self._dead_next = await self._taken.note(DEAD, self._dead_next)
            except InvariantError:  # home's DEAD was lost, and begins anew
                self._dead_next = 1
            except (UnavailableError, MissingError) as error:
                self._say.warning("dead_unread", reason=error.message)
        try:
            for spec in GATHERED:
                await self._tails.read(spec)
        except (UnavailableError, UsageError, MissingError) as error:  # what isn't known isn't purged
            self._say.warning("taken_unread", reason=error.message)
        await asyncio.gather(*(self._visit(site) for site in self._names.sites))

    async def _visit(self, site: str) -> None:
        across = Across(self._bus.connection, site)
        try:
            await self._fit_lane(across)
            found = await self._compare(across)
            doubtful = site not in self._met or site in self._away or any(one.regressed for one in found.values())
            with contextlib.suppress(UsageError):  # users without these rights: said as site_unchecked
                await self._issue_again(across, acked=doubtful)
            self._met.add(site)
            if not self._keep_history:
                await self._purge(across, found)
            await self._sweep_partials(across)
        except (UnavailableError, UsageError) as error:  # the latter: a bus whose users were made without this site
            if site not in self._away:  # once for each cut
                self._say.warning("site_away", site=site, reason=error.message)
            self._away.add(site)
            return
        if site in self._away:
            self._away.discard(site)
            self._say.info("site_back", site=site)

    async def _compare(self, across: Across) -> dict[Spec, Compared]:
        """What of the site's streams is what home took in of them; without those of which that can't be told."""
        looked = await asyncio.gather(*(self._look(across, spec) for spec in GATHERED))
        return {spec: found for spec, found in zip(GATHERED, looked, strict=True) if found is not None}

    async def _look(self, across: Across, spec: Spec) -> Compared | None:
        key = across.domain, spec.key
        found = None
        try:
            found = await self._tails.look(across, spec)
            trouble = ""
            if found is not None and found.regressed:
                trouble = f"site_regressed: {spec.key} at {across.domain} lost messages; what it has now is being taken in"
        except Regressed as error:
            trouble = f"site_regressed: {error.message}"
        except UsageError as error:
            trouble = (
                f"site_unchecked: {spec.key} at {across.domain} can't be compared with what home took in, and isn't purged "
                f"({error.message}): write the bus's users anew by `towline access nats`"
            )
        except MissingError:  # home has no such stream
            trouble = ""
        if trouble and self._troubles.get(key) != trouble:
            self._say.error(trouble.partition(":")[0], site=across.domain, stream=spec.key, reason=trouble.partition(": ")[2])
        if trouble:
            self._troubles[key] = trouble
        else:
            self._troubles.pop(key, None)
        return found

    async def _issue_again(self, across: Across, *, acked: bool) -> None:
        """What only records told the site of that it has lost: a mirror goes on after what home had sent it before. `acked`:
        also what the site's workers were done with and is nowhere: it was lost before home had it."""
        lane, state = self._names.lane_consumer(TRAIN, 1), self._state()
        info = await across.call(f"STREAM.INFO.{lane.stream}")
        gone: frozenset[int] = frozenset()
        if info is not None and info["state"].get("num_deleted"):
            info = await across.call(f"STREAM.INFO.{lane.stream}", {"deleted_details": True})
            gone = frozenset(() if info is None else info["state"].get("deleted") or ())
        done = await across.confirmed(lane.stream, lane.durable) if acked else 0
        if not gone and not done:
            return
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def missing(group: int, index: int, sequence: int) -> bool:
            async with gate:
                return not await self._made(across, group, index, sequence)

        told = list(_told_by(state, across.domain, gone, done))
        found = await asyncio.gather(*(missing(*one) for one in told))
        still = set(_told_by(state, across.domain, gone, done))  # what has come meanwhile isn't missing
        again = [one for one, is_missing in zip(told, found, strict=True) if is_missing and one in still]
        state.lost.update(((group, index), None) for group, index, _ in again)
        if again:
            self._say.error("site_regressed", site=across.domain, stream=lane.stream, issued_again=len(again))

    async def _made(self, across: Across, group: int, sample: int, task_sequence: int) -> bool:
        """Whether there is a trajectory of it, or a failure of this task, at home or on its way."""
        async for _ in self._last_of_each(across, TRAJECTORY, self._names.trajectory(group, sample)):
            return True
        async for data in self._last_of_each(across, OUTCOME, self._names.failure(group, sample)):
            with contextlib.suppress(MalformedError):
                if decode_outcome(data).task_sequence == task_sequence:
                    return True
        return False

    async def _last_of_each(self, across: Across, spec: StreamSpec, subject: str) -> AsyncIterator[bytes]:
        """The subject's last message at home and at the site, where there is one."""
        stream = self._names.stream(spec)
        here = await self._bus.jetstream.get_from_leader(stream, {"last_by_subj": subject})
        if here is not None:
            yield here.data
        there = await across.last(stream, subject)
        if there is not None:
            yield there

    async def _fit_lane(self, across: Across) -> None:
        """Nothing is known of a site that isn't heard of: its lane stays as it was."""
        slots = self._presence().slots.get(across.domain, 0)
        if not slots:
            return
        spec = self._names.lane_consumer(TRAIN, slots, ack_wait_seconds=self._ack_wait_seconds)
        if await across.fit(spec):
            self._say.info("lane_fitted", site=across.domain, slots=slots, max_ack_pending=spec.max_ack_pending)

    async def _purge(self, across: Across, found: dict[Spec, Compared]) -> None:
        floors = {CONTROL: self._control_floor()}
        for spec, compared in found.items():
            if not isinstance(spec, StreamSpec):
                continue  # a bucket's entries replace each other, or expire
            if sequence := min(self._taken.of(across.domain, spec, compared.way), compared.same):
                confirmed = await across.confirmed(self._names.stream(spec), compared.consumer)
                floors[spec] = min(sequence, confirmed) + 1
        for spec, floor in floors.items():
            if gone := await across.purge_below(self._names.stream(spec), floor):
                self._say.info("purged", site=across.domain, stream=spec.key, below=floor, messages=gone)

    async def _sweep_partials(self, across: Across) -> None:
        """A group at a time: each sample leaves one, and each purge takes a round trip over the line."""
        stream, state = self._names.stream(PARTIAL), self._state()
        subjects = [self._names.relative(found) for found in await across.subjects(stream, self._names.subject("partial.>"))]
        for group in sorted({subject.split(".")[1] for subject in subjects if is_closed(state, subject)}):
            await across.purge_subject(stream, self._names.subject(f"partial.{group}.*"))


def _told_by(state: State, site: str, gone: frozenset[int], done: int) -> Iterator[tuple[int, int, int]]:
    """(group, sample, task sequence) of what the site's workers are to make, neither scored nor failed nor cancelled, where the
    task's record is among `gone`, or not above `done`."""
    for group in state.groups.values():
        if group.batch is not None:
            continue
        for index, sample in enumerate(group.samples):
            if sample is None or sample.site != site or sample.scored is not None or sample.failing:
                continue
            if sample.cancelled >= sample.task_sequence:
                continue
            if sample.task_sequence in gone or sample.task_sequence <= done:
                yield group.number, index, sample.task_sequence
