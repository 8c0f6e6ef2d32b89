"""Who is where: the slots that each site has at the moment, and which sites nothing is heard of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from towline.contract.policy import ReplicaInfo

HOME = ""


@dataclass(frozen=True, slots=True)
class Presence:
    """`slots`: site -> those of its replicas that are alive, "" is home. `silent`: sites that count as lost."""

    slots: Mapping[str, int] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()


class Listener:
    """Hears the registry. A site counts from the listener's start on as heard, so that a new buffer gives it its time."""

    def __init__(self, sites: Iterable[str], silent_seconds: float) -> None:
        self._silent_seconds = silent_seconds
        self._heard: dict[str, float | None] = dict.fromkeys(sites)
        self._homes: dict[str, tuple[str, str]] = {}
        """Replica -> where its entry was said to come from last, and where before that."""
        self.twice: dict[str, tuple[str, str]] = {}
        """Names whose entries come from two places in turn: two replicas that started while the line between them was cut."""

    def hear(self, replicas: Iterable[ReplicaInfo], now: float) -> Presence:
        """`replicas`: whose entries haven't expired, at `now`, seconds of one clock."""
        slots: dict[str, int] = {}
        homes: dict[str, tuple[str, str]] = {}
        for replica in replicas:
            site = replica.site or HOME
            slots[site] = slots.get(site, 0) + replica.slots
            last, before = self._homes.get(replica.replica, (site, site))
            if site == before != last:
                self.twice[replica.replica] = (site, last)
            homes[replica.replica] = (last, before) if site == last else (site, last)
        self._homes = homes  # a name whose entry has expired is free again, and may be taken elsewhere
        for site, heard in self._heard.items():
            if site in slots or heard is None:
                self._heard[site] = now
        return Presence(
            slots,
            frozenset(site for site, heard in self._heard.items() if heard is not None and now - heard > self._silent_seconds),
        )
