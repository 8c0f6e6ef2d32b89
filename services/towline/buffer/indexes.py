"""Indexes over the facts, so that deciding costs what has changed and not what is open.

They follow from the facts: `enter` puts an open group into every one of them, `leave` takes it out.
"""

from __future__ import annotations

import heapq
import math

from towline.buffer.facts import Facts
from towline.buffer.groups import Group, Sample
from towline.buffer.totals import Totals

_MOST_LEFT_DEADLINES = 256
"""Of groups that have left, beside as many as are open."""


class Indexes(Facts):
    """Facts that are looked up by what has to be decided about them."""

    def __init__(self) -> None:
        super().__init__()
        self.complete: dict[int, None] = {}
        """Open groups to be trained, with every score."""
        self.open_train: dict[int, None] = {}
        self.flat: dict[int, None] = {}
        """Of those, the ones whose rewards are all equal."""
        self.open_eval: dict[int, dict[int, None]] = {}
        """Version -> its eval groups that are neither dropped nor evaluated."""
        self.failing: dict[tuple[int, int], None] = {}
        self.doomed: dict[int, str] = {}
        """Group -> why no score can save it."""
        self.stranded: dict[tuple[int, int], None] = {}
        """Samples whose task waits for a depth that a fork took away."""
        self.surplus: dict[tuple[int, int], None] = {}
        """Samples that an earlier task scored after they had been issued again."""
        self.by_version: dict[int, dict[int, None]] = {}
        """Version -> open train groups that hold tokens of it."""
        self.lost: dict[tuple[int, int], None] = {}
        """Samples whose trajectory a stream lost, as this process found (not a fact)."""
        self.offered_by: dict[int, dict[int, None]] = {}
        """Version -> offers that hold tokens of it."""
        self.whole_offers: dict[int, None] = {}
        """Offers with every score."""
        self.totals = Totals()
        """Sums over all batches that stand, the final ones included."""
        self.deadlines: list[tuple[float, int]] = []
        """A heap; groups that have left stay in it for a while (`_forget_deadlines`)."""

    def doom(self, group: Group, sample: Sample, reason: str) -> None:
        """No score can save the group: it must be dropped as `reason`."""
        sample.final = sample.final or reason
        self.doomed.setdefault(group.number, sample.final)

    def look_for_surplus(self, group: Group, index: int) -> None:
        sample = group.samples[index]
        if group.task is None or sample is None or sample.scored is None:
            return
        if sample.scored.task_sequence != sample.task_sequence and sample.cancelled < sample.task_sequence:
            self.surplus[group.number, index] = None

    def index_score(self, group: Group, sample: Sample) -> None:
        if group.is_train and sample.scored is not None:
            for version in sample.scored.versions:
                self.by_version.setdefault(version, {})[group.number] = None

    def index_complete(self, group: Group) -> None:
        self.complete[group.number] = None
        if group.flat:
            self.flat[group.number] = None

    def enter(self, group: Group) -> None:
        """The group is open (again): into every index that its facts put it in."""
        if group.deadline < math.inf:
            heapq.heappush(self.deadlines, (group.deadline, group.number))
        if group.is_train:
            self.open_train[group.number] = None
            if group.complete:
                self.index_complete(group)
        elif group.version is not None:
            self.open_eval.setdefault(group.version, {})[group.number] = None
            if group.complete:
                self.eval_scores[group.version] = self.eval_scores.get(group.version, 0) + 1
        for index, sample in enumerate(group.samples):
            if sample is None:
                continue
            self.index_score(group, sample)
            if sample.final is not None:
                self.doomed.setdefault(group.number, sample.final)
            if sample.failing:
                self.failing[group.number, index] = None
            self.look_for_surplus(group, index)
            waits = group.is_train and sample.scored is None and sample.task_sequence < self.fork_sequence
            if waits and sample.not_before_depth > self.fork_depth:
                self.stranded[group.number, index] = None

    def leave(self, group: Group) -> None:
        """The group isn't open any more: out of every index."""
        number = group.number
        self.open_train.pop(number, None)
        self._forget_deadlines()
        self.complete.pop(number, None)
        self.flat.pop(number, None)
        self.doomed.pop(number, None)
        if group.version is not None:
            self.open_eval.get(group.version, {}).pop(number, None)
            if group.complete:
                self.eval_scores[group.version] -= 1
                if not self.eval_scores[group.version]:
                    del self.eval_scores[group.version]
        for version in group.versions() if group.is_train else ():
            holders = self.by_version.get(version, {})
            holders.pop(number, None)
            if not holders:
                self.by_version.pop(version, None)
        for index in range(group.size):
            for keyed in (self.failing, self.stranded, self.surplus, self.lost):
                keyed.pop((number, index), None)

    def overdue(self, now: float) -> list[int]:
        """Open groups that lack a score at their deadline."""
        found: dict[int, None] = {}
        while self.deadlines and self.deadlines[0][0] <= now:
            number = heapq.heappop(self.deadlines)[1]
            group = self.groups.get(number)
            if group is not None and group.batch is None and not group.complete:
                found[number] = None
        for number in found:  # they stay listed until they are dropped
            heapq.heappush(self.deadlines, (self.groups[number].deadline, number))
        return list(found)

    def _forget_deadlines(self) -> None:
        """Of groups that have left, once most are: a deadline may be a long time away."""
        if len(self.deadlines) > _MOST_LEFT_DEADLINES:
            live = sum(map(len, self.open_eval.values())) + len(self.open_train)
            if len(self.deadlines) > _MOST_LEFT_DEADLINES + 2 * live:
                numbers = (*self.open_train, *(number for numbers in self.open_eval.values() for number in numbers))
                groups = [self.groups[number] for number in numbers if self.groups[number].deadline < math.inf]
                self.deadlines = [(group.deadline, group.number) for group in groups]
                heapq.heapify(self.deadlines)

    # offers

    def note_offer(self, offer: Group, index: int) -> None:
        """Its sample `index` has got its score."""
        sample = offer.samples[index]
        assert sample is not None
        assert sample.scored is not None
        for version in sample.scored.versions:
            self.offered_by.setdefault(version, {})[offer.number] = None
        if offer.complete:
            self.whole_offers[offer.number] = None

    def forget_offer(self, number: int) -> Group | None:
        """It's admitted or turned away: out of the offers and their indexes. The group, if it was one."""
        self.refused.pop(number, None)
        self.whole_offers.pop(number, None)
        offer = self.offers.pop(number, None)
        for version in offer.versions() if offer is not None else ():
            holders = self.offered_by.get(version, {})
            holders.pop(number, None)
            if not holders:
                self.offered_by.pop(version, None)
        return offer
