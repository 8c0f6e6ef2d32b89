"""Which replica takes a request: among those that may, the one that has its prefix while there is room, else the least busy.

Pure: `Fleet` knows what there is, this decides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from towline.contract.codec import digest
from towline.errors import MissingError
from towline.store.lineage import Lineage

FIRST_BLOCK_TOKENS = 64
PREFIXES_KEPT = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """At most one is set. `min_version` is met by a version of the newest line with at least that version's depth."""

    min_version: int | None = None
    exact_version: int | None = None

    @property
    def target(self) -> int | None:
        return self.exact_version if self.exact_version is not None else self.min_version

    def met_by(self, lineage: Lineage, version: int | None) -> bool:
        if version is None:
            return False
        if self.exact_version is not None:
            return version == self.exact_version
        if version >= lineage.next_number:
            return True  # the replica has read further in the LOG; its door knows
        try:
            least = 0 if self.min_version is None else lineage.depth(self.min_version)
            return lineage.on_line(version) and lineage.depth(version) >= least
        except MissingError:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica as routing sees it."""

    name: str
    version: int | None
    slots: int
    load: int
    """Slots in use and requests that wait there."""
    usable: bool
    """It's ready, not draining, and wasn't found dead lately."""
    pinned: bool

    @property
    def share(self) -> float:
        return self.load / max(self.slots, 1)


def order(candidates: Iterable[Candidate], constraint: Constraint, lineage: Lineage, favourite: str | None) -> list[Candidate]:
    """Those that may serve the request, the best first. A pinned replica's old version is for whoever names it: without a
    constraint it comes last."""
    fit = [one for one in candidates if one.usable and constraint.met_by(lineage, one.version)]
    unasked = constraint.target is None

    def rank(one: Candidate) -> tuple[bool, bool, float, str]:
        warm = one.name == favourite and one.load < one.slots
        return (unasked and one.pinned, not warm, one.share, one.name)

    return sorted(fit, key=rank)


class Prefixes:
    """Where prompts that begin alike went last, and a session's requests. Forgets the oldest."""

    def __init__(self, kept: int = PREFIXES_KEPT) -> None:
        self._kept = kept
        self._seen: OrderedDict[bytes, str] = OrderedDict()

    def favourite(self, prompt: list[int], session: str | None) -> str | None:
        """The session's replica, else that of the longest prefix that is known."""
        for key in [*_session(session), *reversed(_blocks(prompt))]:
            if (found := self._seen.get(key)) is not None:
                return found
        return None

    def note(self, prompt: list[int], session: str | None, replica: str) -> None:
        for key in [*_session(session), *_blocks(prompt)]:
            self._seen[key] = replica
            self._seen.move_to_end(key)
        while len(self._seen) > self._kept:
            self._seen.popitem(last=False)


def _session(session: str | None) -> list[bytes]:
    return [] if session is None else [b"s" + digest(session.encode())]


def _blocks(prompt: list[int]) -> list[bytes]:
    """Digests of the prefixes of 64, 128, 256, … tokens."""
    found: list[bytes] = []
    length = FIRST_BLOCK_TOKENS
    if length > len(prompt):
        return found
    raw = np.asarray(prompt, "<i4").tobytes()  # plain: what goes over the bus is packed, and packing costs more than all the rest
    while length <= len(prompt):
        found.append(digest(raw[: 4 * length]))
        length *= 2
    return found
