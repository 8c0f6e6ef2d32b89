"""Which version stands on which: the LOG's entries as a tree, its epochs, and the line of ancestors that the run is on.

Pure: it knows entries and nothing else, and refuses one that breaks the protocol's rules (docs/design/001-protocol.md, 1
and 3) with `InvariantError`. Numbers are never compared to judge freshness; depths are.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass

from towline.contract.entries import BaseEntry, LogEntry, OpenEntry, QuarantineEntry, VersionEntry
from towline.errors import InvariantError, MissingError


@dataclass(slots=True)
class _Version:
    parent: int | None
    depth: int
    epoch: int | None


class Lineage:
    """Grows by `extend`, entry by entry in order; versions never disappear, the line may turn elsewhere.

    The epoch head is the epoch's last version, or its base while it has none. `latest` is the newest epoch's head or, where
    that is quarantined, its nearest ancestor that isn't. The line is `latest` with its ancestors. Methods that take a version
    raise `MissingError` for a number that isn't one. Safe to read in one thread while another extends.
    """

    def __init__(self) -> None:
        self._next = 0
        self._versions: dict[int, _Version] = {}
        self._epochs: dict[int, tuple[int, int]] = {}  # epoch -> (base, head)
        self._bad: set[int] = set()
        self._newest: int | None = None
        self._line: list[tuple[int, int]] | None = []  # (depth, version), entry 0 first; None: to be walked anew
        self._lock = threading.RLock()

    @property
    def next_number(self) -> int:
        """The number of the entry that may come next."""
        return self._next

    def check(self, entry: LogEntry) -> None:
        """`InvariantError` unless the entry may come next."""
        if entry.number != self._next:
            raise _broken(entry, f"entry {self._next} comes next")
        if isinstance(entry, BaseEntry) != (entry.number == 0):
            raise _broken(entry, "entry 0, and no other, is the base model")
        if isinstance(entry, OpenEntry):
            self._check_base(entry, entry.base)
            if entry.depth != self._versions[entry.base].depth:
                raise _broken(entry, f"depth {entry.depth} where its base {entry.base} has {self._versions[entry.base].depth}")
        elif isinstance(entry, VersionEntry):
            self._check_base(entry, entry.base)
            if entry.epoch != self._newest:
                raise _broken(entry, f"epoch {entry.epoch} where {self._newest} is the newest")
            if entry.base != self.epoch_head(entry.epoch):
                raise _broken(entry, f"base {entry.base} where the epoch's head is {self.epoch_head(entry.epoch)}")
            if entry.depth <= self._versions[entry.base].depth:
                raise _broken(entry, f"depth {entry.depth} doesn't grow over its base's, {self._versions[entry.base].depth}")
        elif isinstance(entry, QuarantineEntry) and (entry.version == 0 or entry.version not in self._versions):
            raise _broken(entry, f"{entry.version} can't be quarantined: it's the base model, or no version")

    def extend(self, entry: LogEntry) -> None:
        """Take the next entry in."""
        with self._lock:
            self.check(entry)
            if isinstance(entry, BaseEntry):
                self._versions[0] = _Version(None, 0, None)
                self._line = [(0, 0)]
            elif isinstance(entry, OpenEntry):
                self._epochs[entry.number] = (entry.base, entry.base)
                self._newest = entry.number
                self._line = None
            elif isinstance(entry, VersionEntry):
                self._versions[entry.number] = _Version(entry.base, entry.depth, entry.epoch)
                self._epochs[entry.epoch] = (self._epochs[entry.epoch][0], entry.number)
                if self._line is not None and self._line[-1][1] == entry.base:
                    self._line.append((entry.depth, entry.number))
                else:
                    self._line = None
            else:
                self._quarantine(entry.version)
                self._line = None
            self._next += 1

    @property
    def newest_epoch(self) -> int | None:
        """The number of the last `open`; None before the first."""
        with self._lock:
            return self._newest

    def epoch_base(self, epoch: int) -> int:
        return self._epoch(epoch)[0]

    def epoch_head(self, epoch: int) -> int:
        """Also where it's quarantined."""
        return self._epoch(epoch)[1]

    @property
    def latest(self) -> int:
        """The version to serve; `MissingError` while the LOG is empty."""
        with self._lock:
            line = self._current_line()
            if not line:
                raise MissingError("the LOG has no entry 0 yet; the trainer writes it", code="log_empty")
            return line[-1][1]

    def __contains__(self, version: object) -> bool:
        """Whether a version has this number; what costs the same however long the LOG is."""
        return version in self._versions

    def versions(self) -> list[int]:
        """Every version's number in order, entry 0 and those off the line included."""
        with self._lock:
            return list(self._versions)

    def parent(self, version: int) -> int | None:
        """None for entry 0."""
        return self._version(version).parent

    def depth(self, version: int) -> int:
        """Batches consumed from entry 0 to the version."""
        return self._version(version).depth

    def epoch_of(self, version: int) -> int | None:
        """The epoch that committed it; None for entry 0."""
        return self._version(version).epoch

    def quarantined(self, version: int) -> bool:
        """Whether it or an ancestor is."""
        self._version(version)
        return version in self._bad

    def path(self) -> list[int]:
        """The line: entry 0 first, `latest` last; empty while the LOG is."""
        with self._lock:
            return [version for _, version in self._current_line()]

    def line_from(self, depth: int) -> list[int]:
        """The line's versions of at least this depth, in order; costs what is found, not how long the line is."""
        with self._lock:
            line = self._current_line()
            return [version for _, version in line[bisect_left(line, (depth, 0)) :]]

    def on_line(self, version: int) -> bool:
        """Whether it is `latest` or an ancestor of it."""
        depth = self._version(version).depth
        return self.version_at_depth(depth) == version

    def version_at_depth(self, depth: int) -> int | None:
        """The line's version of exactly this depth; None where steps were coalesced past it, or above `latest`'s."""
        found = self.version_reaching(depth)
        return found if found is not None and self._versions[found].depth == depth else None

    def version_reaching(self, depth: int) -> int | None:
        """The line's first version of at least this depth; so batch j went into `version_reaching(j + 1)`."""
        with self._lock:
            line = self._current_line()
            place = bisect_left(line, (depth, 0))
            return line[place][1] if place < len(line) else None

    def common_ancestor(self, version: int) -> int:
        """The line's last version that is `version` or an ancestor of it."""
        found = version
        while not self.on_line(found):
            parent = self._version(found).parent
            assert parent is not None, "entry 0 is always on the line"
            found = parent
        return found

    def effective_depth(self, version: int) -> int:
        """What staleness counts from: its depth on the line, off the line its common ancestor's."""
        return self._version(self.common_ancestor(version)).depth

    def is_ancestor(self, ancestor: int, version: int) -> bool:
        """Whether `version` is `ancestor` or stands on it."""
        least = self._version(ancestor).depth
        step: int | None = version
        while step is not None and self._version(step).depth >= least:
            if step == ancestor:
                return True
            step = self._versions[step].parent
        return False

    def chain(self, version: int, frm: int) -> list[int]:
        """The versions to apply, in order, to get from `frm` to `version`; `MissingError` where that one isn't its ancestor."""
        if not self.is_ancestor(frm, version):
            raise MissingError(f"version {version} doesn't stand on {frm}; start from another copy", code="no_chain")
        found, step = [], version
        while step != frm:
            found.append(step)
            parent = self._versions[step].parent
            assert parent is not None
            step = parent
        return found[::-1]

    def _check_base(self, entry: LogEntry, base: int) -> None:
        if base not in self._versions:
            raise _broken(entry, f"its base {base} is no version")
        if base in self._bad:
            raise _broken(entry, f"its base {base} is quarantined")

    def _quarantine(self, version: int) -> None:
        self._bad.add(version)
        for number, found in self._versions.items():  # in their order: whatever stands on another comes after it
            if found.parent in self._bad:
                self._bad.add(number)

    def _current_line(self) -> list[tuple[int, int]]:
        if self._line is None:
            line = []
            step: int | None = 0 if self._newest is None else self._epochs[self._newest][1]
            while step is not None:
                if step not in self._bad:
                    line.append((self._versions[step].depth, step))
                step = self._versions[step].parent
            self._line = line[::-1]
        return self._line

    def _version(self, version: int) -> _Version:
        found = self._versions.get(version)
        if found is None:
            raise MissingError(f"the LOG has no version {version}", code="version_missing")
        return found

    def _epoch(self, epoch: int) -> tuple[int, int]:
        with self._lock:
            found = self._epochs.get(epoch)
        if found is None:
            raise MissingError(f"the LOG has no epoch {epoch}", code="epoch_missing")
        return found


def is_eval_version(lineage: Lineage, version: int, every: int, steps: int) -> bool:
    """Whether the version is evaluated: entry 0, each that takes the depth past a multiple of `every`, and depth `steps`.

    `every` 0: none is.
    """
    if every <= 0:
        return False
    parent, depth = lineage.parent(version), lineage.depth(version)
    return parent is None or depth == steps or depth // every > lineage.depth(parent) // every


def _broken(entry: LogEntry, why: str) -> InvariantError:
    return InvariantError(f"log entry {entry.number} ({type(entry).__name__}): {why}", code="log_rule")
