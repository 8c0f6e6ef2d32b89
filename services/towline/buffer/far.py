"""What home's buffer does at a site, over the site's connection: takes away there what nobody needs, and fits its lane.

A site decides nothing, so what may go there follows from home's state. Of the site's own streams goes what home has taken in and
has purged itself, or of DEAD what home has taken in: its sequence at the site stands in home's message. But a site that lost its
disk counts from 1 again; so the consumer that home takes in by has the last word, which is as old as the site's stream and knows
what of it home has confirmed. Of its copy of CONTROL goes what home's has purged. While the line is cut nothing goes, and nothing
needs to: no floor ever sinks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from towline.buffer.leftovers import is_closed
from towline.buffer.presence import Presence
from towline.buffer.state import State
from towline.bus.across import Across
from towline.bus.client import Bus
from towline.bus.origins import newest_taken
from towline.bus.sites import sync_name
from towline.bus.topology import CONTROL, DEAD, PARTIAL, StreamSpec
from towline.contract.task import TRAIN
from towline.errors import InvariantError, MissingError, UnavailableError, UsageError

FAR_SECONDS = 10.0
"""Between rounds."""


class Taken:
    """What of each site's streams home has taken in and needs no more: (site, stream) -> the highest sequence there."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._newest: dict[tuple[str, StreamSpec], int] = {}

    async def note(self, spec: StreamSpec, start: int, end: int | None = None) -> int:
        """Home's messages [start, end) of the stream are needed no more; the first sequence that wasn't looked at."""
        sites = self._bus.topology.sites
        if not sites:
            return start
        stream = self._bus.topology.stream(spec)
        found, after = await newest_taken(self._bus.jetstream, stream, sites, start=start, end=end)
        for site, sequence in found.items():
            self._newest[site, spec] = max(self._newest.get((site, spec), 0), sequence)
        return after

    def of(self, site: str) -> Mapping[StreamSpec, int]:
        return {spec: sequence for (whose, spec), sequence in self._newest.items() if whose == site}


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
        self._ack_wait_seconds = ack_wait_seconds
        self._keep_history = keep_history
        self._dead_next = 1
        self._away: set[str] = set()
        self._say = structlog.get_logger("towline.buffer.far")

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
        await asyncio.gather(*(self._visit(site) for site in self._names.sites))

    async def _visit(self, site: str) -> None:
        across = Across(self._bus.connection, site)
        try:
            await self._fit_lane(across)
            if not self._keep_history:
                await self._purge(across)
            await self._sweep_partials(across)
        except (UnavailableError, UsageError) as error:  # the latter: a bus whose users were made without this site
            if site not in self._away:  # once for each cut
                self._say.warning("site_away", site=site, reason=error.message)
            self._away.add(site)
            return
        if site in self._away:
            self._away.discard(site)
            self._say.info("site_back", site=site)

    async def _fit_lane(self, across: Across) -> None:
        """Nothing is known of a site that isn't heard of: its lane stays as it was."""
        slots = self._presence().slots.get(across.domain, 0)
        if not slots:
            return
        spec = self._names.lane_consumer(TRAIN, slots, ack_wait_seconds=self._ack_wait_seconds)
        if await across.fit(spec):
            self._say.info("lane_fitted", site=across.domain, slots=slots, max_ack_pending=spec.max_ack_pending)

    async def _purge(self, across: Across) -> None:
        floors = {CONTROL: self._control_floor()}
        for spec, sequence in self._taken.of(across.domain).items():
            confirmed = await across.confirmed(self._names.stream(spec), sync_name(across.domain))
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
