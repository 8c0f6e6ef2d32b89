"""The lineage against an oracle that knows no cache: every answer from the whole list of entries, by the rules' words."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from towline.contract.entries import LogEntry, OpenEntry, QuarantineEntry, VersionEntry
from towline.store.lineage import Lineage

from .entries import base, opened, quarantine, version


class Oracle:
    def __init__(self, entries: list[LogEntry]) -> None:
        self.entries = entries

    def versions(self) -> list[int]:
        return [e.number for e in self.entries if e.number == 0 or isinstance(e, VersionEntry)]

    def parent(self, v: int) -> int | None:
        entry = self.entries[v]
        return entry.base if isinstance(entry, VersionEntry) else None

    def depth(self, v: int) -> int:
        entry = self.entries[v]
        return entry.depth if isinstance(entry, VersionEntry) else 0

    def ancestors(self, v: int) -> list[int]:
        """v first, 0 last."""
        parent = self.parent(v)
        return [v] if parent is None else [v, *self.ancestors(parent)]

    def quarantined(self, v: int) -> bool:
        named = {e.version for e in self.entries if isinstance(e, QuarantineEntry)}
        return any(a in named for a in self.ancestors(v))

    def newest_epoch(self) -> int | None:
        return max((e.number for e in self.entries if isinstance(e, OpenEntry)), default=None)

    def epoch_head(self, epoch: int) -> int:
        own = [e.number for e in self.entries if isinstance(e, VersionEntry) and e.epoch == epoch]
        entry = self.entries[epoch]
        assert isinstance(entry, OpenEntry)
        return max(own, default=entry.base)

    def latest(self) -> int:
        epoch = self.newest_epoch()
        head = 0 if epoch is None else self.epoch_head(epoch)
        return next(a for a in self.ancestors(head) if not self.quarantined(a))

    def path(self) -> list[int]:
        return self.ancestors(self.latest())[::-1]

    def common(self, v: int) -> int:
        return max(set(self.ancestors(v)) & set(self.path()))


@st.composite
def logs(draw: st.DrawFn) -> list[LogEntry]:
    entries: list[LogEntry] = [base()]
    for number in range(1, draw(st.integers(1, 24))):
        oracle = Oracle(entries)
        good = [v for v in oracle.versions() if not oracle.quarantined(v)]
        epoch = oracle.newest_epoch()
        can_commit = epoch is not None and not oracle.quarantined(oracle.epoch_head(epoch))
        kind = draw(st.sampled_from(["version"] * 6 * can_commit + ["open", "quarantine"]))
        if kind == "version":
            assert epoch is not None
            head = oracle.epoch_head(epoch)
            entries.append(version(number, epoch, head, oracle.depth(head) + draw(st.integers(1, 3))))
        elif kind == "quarantine" and len(oracle.versions()) > 1:
            entries.append(quarantine(number, draw(st.sampled_from(oracle.versions()[1:]))))
        else:
            at = draw(st.sampled_from(good))
            entries.append(opened(number, at, oracle.depth(at)))
    return entries


@settings(max_examples=150, deadline=None)
@given(logs(), st.data())
def test_every_answer_is_the_oracles_after_every_entry(entries: list[LogEntry], data: st.DataObject) -> None:
    lineage = Lineage()
    for count, entry in enumerate(entries, 1):
        lineage.extend(entry)
        if count < len(entries) and not data.draw(st.booleans()):
            continue  # answers are cached: leave some states unasked
        oracle = Oracle(entries[:count])
        versions, path = oracle.versions(), oracle.path()
        assert lineage.versions() == versions == [number for number in range(count + 2) if number in lineage]
        assert lineage.newest_epoch == oracle.newest_epoch()
        assert (lineage.latest, lineage.path()) == (oracle.latest(), path)
        for v in versions:
            assert lineage.parent(v) == oracle.parent(v)
            assert lineage.depth(v) == oracle.depth(v)
            assert lineage.quarantined(v) == oracle.quarantined(v)
            assert lineage.on_line(v) == (v in path)
            assert lineage.common_ancestor(v) == oracle.common(v)
            assert lineage.effective_depth(v) == oracle.depth(oracle.common(v))
            for a in versions:
                expected = a in oracle.ancestors(v)
                assert lineage.is_ancestor(a, v) == expected
                if expected:
                    assert lineage.chain(v, a) == [x for x in oracle.ancestors(v)[::-1] if x > a]
        for depth in range(oracle.depth(oracle.latest()) + 2):
            exact = [v for v in path if oracle.depth(v) == depth]
            past = [v for v in path if oracle.depth(v) >= depth]
            assert lineage.version_at_depth(depth) == (exact[0] if exact else None)
            assert lineage.version_reaching(depth) == (past[0] if past else None)
            assert lineage.line_from(depth) == past
