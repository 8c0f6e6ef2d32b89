"""Canaries: a share of the fleet takes a new version first, the others follow once all of those have proved it for a while.

Pure: what is known of the fleet is told by `see`, times are seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

import xxhash

from towline.store.lineage import Lineage

NONE_YET = -1


def canaries(names: Iterable[str], share: float) -> set[str]:
    """The `share` of the names that hash lowest, rounded up: at least one where there is a name. Who comes or goes moves the
    bound by one, so the others stay what they are."""
    ordered = sorted(set(names), key=lambda name: (xxhash.xxh3_64_intdigest(name.encode()), name))
    return set(ordered[: math.ceil(share * len(ordered))])


class CanaryWatch:
    """What the canaries of one fleet have proved, and for how long."""

    def __init__(self, *, share: float, seconds: float) -> None:
        self._share, self._seconds = share, seconds
        self._proved: deque[tuple[float, int]] = deque()
        """(since when, the version that every canary has proved, or one that stands on it); each once, in order."""
        self._cleared = NONE_YET
        self._first = True
        self.ours: set[str] = set()

    def see(self, lineage: Lineage, names: Iterable[str], acked: Mapping[str, int], now: float) -> None:
        """`names` live now and subscribe as canaries; `acked` are the versions that replicas have last acknowledged."""
        names = set(names)
        self.ours = canaries(names, self._share)
        if self._first:
            # Whoever joins takes the others' word for what they serve already.
            self._first = False
            served = [acked[name] for name in names - self.ours if name in acked and acked[name] in lineage.versions()]
            self._cleared = max(served, key=lineage.effective_depth, default=NONE_YET)
        proved = [acked[name] for name in self.ours if name in acked and acked[name] in lineage.versions()]
        if not self.ours or len(proved) < len(self.ours):
            return
        common = min((lineage.common_ancestor(version) for version in proved), key=lineage.depth)
        if not self._proved or self._proved[-1][1] != common:
            self._proved.append((now, common))

    def cleared(self, lineage: Lineage, now: float) -> int:
        """The newest version of the line that the canaries have had for long enough; `NONE_YET` for none."""
        while self._proved and self._proved[0][0] + self._seconds <= now:
            self._cleared = self._proved.popleft()[1]
        if self._cleared == NONE_YET or lineage.quarantined(self._cleared):
            return NONE_YET
        return self._cleared

    def next_at(self) -> float | None:
        """When `cleared` changes by itself."""
        return self._proved[0][0] + self._seconds if self._proved else None
