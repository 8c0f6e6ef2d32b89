"""The auditor's own reading of the LOG: which batch made which depth, and what a version's tokens count as.

It walks parents one by one and keeps no indexes, so that it shares neither code nor mistakes with the lineage that the
services use.
"""

from __future__ import annotations

from collections.abc import Iterable

from towline.contract.entries import BaseEntry, LogEntry, OpenEntry, QuarantineEntry, VersionEntry


class Line:
    """The LOG's versions as a tree."""

    def __init__(self, entries: Iterable[LogEntry]) -> None:
        self.parents: dict[int, int | None] = {}
        self.depths: dict[int, int] = {}
        self.version_epochs: dict[int, int] = {}
        self.batch_cursors: dict[int, int] = {}
        """Version -> the CONTROL sequence of its last batch, as its entry says."""
        self.heads: dict[int, int] = {}
        """Epoch -> its head, or its base."""
        self.quarantined: set[int] = set()
        for entry in entries:
            match entry:
                case BaseEntry():
                    self.parents[entry.number], self.depths[entry.number] = None, 0
                case OpenEntry():
                    self.heads[entry.number] = entry.base
                case VersionEntry():
                    self.parents[entry.number], self.depths[entry.number] = entry.base, entry.depth
                    self.version_epochs[entry.number] = entry.epoch
                    self.batch_cursors[entry.number] = entry.batch_cursor
                    self.heads[entry.epoch] = entry.number
                case QuarantineEntry():
                    self.quarantined.add(entry.version)

    def ancestors(self, version: int) -> list[int]:
        """The version, its parent, and so on to entry 0."""
        found: list[int] = []
        step: int | None = version
        while step is not None:
            found.append(step)
            step = self.parents[step]
        return found

    @property
    def latest(self) -> int | None:
        """The newest epoch's head, or its nearest ancestor that stands on nothing quarantined; None for an empty LOG."""
        if not self.parents:
            return None
        line = self.ancestors(self.heads[max(self.heads)] if self.heads else 0)
        last_bad = max((place for place, version in enumerate(line) if version in self.quarantined), default=-1)
        return line[last_bad + 1]

    def consumed(self) -> list[int]:
        """Epoch by depth: the batch that made depth j+1 of the lineage is that of epoch `consumed()[j]`."""
        epochs: list[int] = []
        for version in reversed(self.ancestors(self.latest) if self.latest is not None else []):
            if version in self.version_epochs:
                epochs.extend([self.version_epochs[version]] * (self.depths[version] - len(epochs)))
        return epochs

    def judged(self, version: int, epoch: int) -> tuple[int, bool]:
        """(depth that the version's tokens count from in a batch of this epoch, whether it's on the epoch's line)."""
        on_line = set(self.ancestors(self.heads[epoch]))
        for step in self.ancestors(version):
            if step in on_line:
                return self.depths[step], step == version
        raise AssertionError("entry 0 is everybody's ancestor")
