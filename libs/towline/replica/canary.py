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
SETTLE_SECONDS = 5.0
"""Who left the registry is counted for so long, and a canary acts as one once it has been one for so long, so that neither a
look that misses an entry nor a fleet that starts together makes everyone a canary. No longer than `seconds`."""


def canaries(names: Iterable[str], share: float) -> set[str]:
    """The `share` of the names that hash lowest, rounded up: at least one where there is a name. Who comes or goes moves the
    bound by one, so the others stay what they are."""
    ordered = sorted(set(names), key=lambda name: (xxhash.xxh3_64_intdigest(name.encode()), name))
    return set(ordered[: math.ceil(share * len(ordered))])


class CanaryWatch:
    """What the canaries of one fleet have proved, and for how long."""

    def __init__(self, *, share: float, seconds: float) -> None:
        self._share, self._seconds, self._settle_seconds = share, seconds, min(seconds, SETTLE_SECONDS)
        self._seen: dict[str, float] = {}
        self._ours_since: dict[str, float] = {}
        self._proved: deque[tuple[float, int]] = deque()
        """(since when, the version that every canary has proved, or one that stands on it); each once, in order."""
        self._cleared = NONE_YET
        self._first = True

    def see(self, lineage: Lineage, names: Iterable[str], acked: Mapping[str, int], now: float) -> None:
        """`names` live now and subscribe as canaries; `acked` are the versions that replicas have last acknowledged."""
        self._seen |= dict.fromkeys(names, now)
        self._seen = {name: at for name, at in self._seen.items() if at + self._settle_seconds >= now}
        ours = canaries(self._seen, self._share)
        self._ours_since = {name: self._ours_since.get(name, now) for name in ours}
        if self._first:
            # Whoever joins takes the others' word for what they serve already.
            self._first = False
            served = [acked[name] for name in self._seen.keys() - ours if name in acked and acked[name] in lineage]
            self._cleared = max(served, key=lineage.effective_depth, default=NONE_YET)
        proved = [acked[name] for name in ours if name in acked and acked[name] in lineage]
        if not ours or len(proved) < len(ours):
            return
        common = min((lineage.common_ancestor(version) for version in proved), key=lineage.depth)
        if not self._proved or self._proved[-1][1] != common:
            self._proved.append((now, common))

    def is_canary(self, name: str, now: float) -> bool:
        """Whether it may go first."""
        since = self._ours_since.get(name)
        return since is not None and since + self._settle_seconds <= now

    def cleared(self, lineage: Lineage, now: float) -> int:
        """The newest version of the line that the canaries have had for long enough; `NONE_YET` for none."""
        while self._proved and self._proved[0][0] + self._seconds <= now:
            self._cleared = self._proved.popleft()[1]
        if self._cleared == NONE_YET or lineage.quarantined(self._cleared):
            return NONE_YET
        return self._cleared
