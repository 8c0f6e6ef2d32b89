"""A view that is looked at for long doesn't read the whole LOG again at each look."""

from __future__ import annotations

from collections import Counter
from typing import Any

from towline.bundle.manifest import StreamRecord
from towline.bus.topology import Topology
from towline.contract.entries import LogEntry
from towline.store.lineage import Lineage
from towline.view.feed import StillFeed
from towline.view.reading import Reading
from unit.store.entries import base, opened, version


class CountingLog:
    """A LOG in a list, which counts how often each entry is asked for."""

    def __init__(self) -> None:
        self.lineage = Lineage()
        self.kept: list[LogEntry] = []
        self.asked: Counter[int] = Counter()

    @property
    def next_number(self) -> int:
        return len(self.kept)

    def refresh(self) -> None:
        pass

    def entry(self, number: int) -> LogEntry:
        self.asked[number] += 1
        return self.kept[number]

    def add(self, *entries: LogEntry) -> None:
        for entry in entries:
            self.lineage.extend(entry)
            self.kept.append(entry)


class Source:
    """A bundle that has a LOG and nothing else."""

    def __init__(self, log: Any) -> None:
        self.log, self.topology = log, Topology("run")

    async def state(self, spec: Any) -> StreamRecord:
        return StreamRecord(created_at="", first=0, last=0, messages=0)

    async def acks(self) -> list[Any]:
        return []


async def test_each_entry_is_asked_for_once_and_a_fork_shows_the_new_line() -> None:
    log = CountingLog()
    reading = Reading(StillFeed(Source(log)))  # type: ignore[arg-type]
    assert (reading.made(), reading.epochs) == ([], 0)
    log.add(base(), opened(1, 0, 0), version(2, 1, 0, 1, wire_bytes=5), version(3, 1, 2, 3, wire_bytes=7, skipped=(2,)))
    for _ in range(3):
        await reading.refresh()
        assert [made.wire_bytes for made in reading.made()] == [5, 7]
        assert reading.epochs == 1
        assert reading.consumed() is reading.consumed()
    assert log.asked == Counter(range(4))
    log.add(opened(4, 2, 1), version(5, 4, 2, 2, wire_bytes=11))
    await reading.refresh()
    assert [made.wire_bytes for made in reading.made()] == [5, 11]
    assert reading.epochs == 2
    assert log.asked == Counter(range(6))
    assert reading.problem == ""
