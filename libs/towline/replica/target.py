"""Which version a replica should serve: the line's latest, but no eval version on the way is skipped while it is open."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from towline.store.lineage import Lineage, is_eval_version


class EvalHolds:
    """Whether a version has to be served, or served on, for its evaluation.

    A version's tasks in CONTROL hold it until they're closed. A version that becomes known while the replica follows is held
    before they are issued too, since the buffer hears of it at the same moment. Both end `hold_seconds` after it was known or,
    if later, began to serve. Times are seconds of one monotonic clock.
    """

    def __init__(
        self, *, every: int, steps: int, hold_seconds: float, closed: Callable[[int], bool], issued: Callable[[int], bool]
    ) -> None:
        self._every, self._steps, self._hold_seconds = every, steps, hold_seconds
        self._closed, self._issued = closed, issued
        self._known_at: dict[int, float] = {}
        self._served_at: dict[int, float] = {}
        self._kept: tuple[int, float] | None = None

    def keep(self, version: int, until: float | None) -> None:
        """Requests of exactly this version run on it: it's held until then, evaluated or not; None: not any more."""
        self._kept = None if until is None else (version, until)

    def know(self, version: int, now: float) -> None:
        """The LOG got the version while this replica followed it, or it is the latest at the start."""
        if self._every > 0:
            self._known_at.setdefault(version, now)

    def serve(self, version: int, now: float) -> None:
        """The replica began to serve it."""
        if self._every > 0:
            self._served_at.setdefault(version, now)

    def open(self, lineage: Lineage, version: int, now: float) -> bool:
        """Whether the replica must go to the version or stay on it."""
        return now < self.until(lineage, version)

    def until(self, lineage: Lineage, version: int) -> float:
        """When the hold ends by itself; minus infinity where there is none."""
        kept = self._kept[1] if self._kept is not None and self._kept[0] == version else -float("inf")
        return max(kept, self._until_evaluated(lineage, version))

    def _until_evaluated(self, lineage: Lineage, version: int) -> float:
        if self._every <= 0 or self._closed(version):
            return -float("inf")
        issued = self._issued(version)
        if not issued and not (version in self._known_at and is_eval_version(lineage, version, self._every, self._steps)):
            return -float("inf")
        served_at = self._served_at.get(version)
        if served_at is not None:
            return served_at + self._hold_seconds
        return float("inf") if issued else self._known_at[version] + self._hold_seconds


@dataclass(frozen=True, slots=True)
class Subscription:
    """Which of the line's versions a replica may go to. `pinned` wins; else `behind` bounds how far it stays back, and `cleared`,
    where it isn't None, is the newest version that it may take (minus 1: none yet)."""

    pinned: int | None = None
    behind: int = 0
    cleared: int | None = None


def choose(
    lineage: Lineage,
    serving: int | None,
    *,
    is_open: Callable[[int], bool],
    refused: Container[int],
    subscription: Subscription = Subscription(),
) -> int | None:
    """The version to serve next, which may be `serving`; None where there is none.

    `serving` stays while it is on the line and open. Else the first open version above it, else the latest. After a fork the
    line starts at the common ancestor, so a replica goes back. Refused versions (those that failed here) are passed over.

    A pinned replica serves its version, on the line or not, and nothing else: None where that isn't in the LOG, is refused or
    quarantined. One that may be `behind` versions behind stays while no more of the line are above it. One that waits for
    canaries goes no further than `cleared`, but never back for that.
    """
    if subscription.pinned is not None:
        pinned = subscription.pinned
        good = pinned in lineage and not lineage.quarantined(pinned) and pinned not in refused
        return pinned if good else None
    if serving is None:
        later = lineage.path()
    else:
        on_line = lineage.on_line(serving)
        if on_line and is_open(serving):
            return serving
        least = lineage.depth(lineage.common_ancestor(serving))
        later = lineage.line_from(least + 1 if on_line else least)
        if on_line and subscription.behind and len(later) <= subscription.behind:
            return serving
    if subscription.cleared is not None:
        later = _up_to(lineage, later, subscription.cleared, serving)
    good_ones = [version for version in later if version not in refused]
    for version in good_ones:
        if is_open(version):
            return version
    return good_ones[-1] if good_ones else serving


def _up_to(lineage: Lineage, later: list[int], cleared: int, serving: int | None) -> list[int]:
    """Those of `later` that canaries have cleared. A replica whose version has left the line goes back to the line's start
    whatever they say, and one that serves nothing begins with the oldest version rather than wait."""
    depth = lineage.depth(lineage.common_ancestor(cleared)) if cleared in lineage else -1
    found = [version for version in later if lineage.depth(version) <= depth]
    if not found and (serving is None or not lineage.on_line(serving)):
        return later[:1]
    return found
