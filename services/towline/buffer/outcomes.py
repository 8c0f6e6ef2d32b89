"""What an outcome does to the state: a score stands for its sample, a failure counts as an attempt or dooms the group."""

from __future__ import annotations

import math

from towline.buffer.groups import Group, Sample, scored_from
from towline.buffer.indexes import Indexes
from towline.bus.topology import MAX_ATOMIC_MESSAGES
from towline.contract.groups import EXTERNAL, is_external
from towline.contract.outcome import Failure, Outcome, Score
from towline.contract.task import EVAL

UNCOUNTED_STAGES = ("not_ready", "version_moved")
"""Failures that say nothing about the sample: nobody served the version it needs in time."""
VERIFY_FAILED = "verify_failed"
_FINAL = {"malformed": "malformed", "verify": VERIFY_FAILED}


class Outcomes(Indexes):
    """The facts, as OUTCOME changes them."""

    def apply_outcome(self, outcome: Outcome, sequence: int) -> None:
        """The outcome at `sequence` of OUTCOME. The first score of a sample stands, whichever of its tasks it names: a
        trajectory is create-only per sample, so there is only one. One of a closed group is late."""
        self.outcome_sequence = sequence
        if isinstance(outcome, Score) and outcome.lane != EVAL:
            self.scored_samples += 1
            self.scored_tokens += outcome.policy_tokens
            self.mixed_samples += len({span.version for span in outcome.version_spans}) > 1
        group = self.groups.get(outcome.group)
        if group is None and is_external(outcome.group):
            self._offer(outcome)
            return
        sample = group.samples[outcome.sample] if group is not None and 0 <= outcome.sample < len(group.samples) else None
        # A trajectory that can't be read says no lane: reward's failure of it has an empty one.
        foreign = group is not None and not _belongs(outcome, group)
        if group is None or sample is None or foreign or sample.scored is not None:
            self.late += 1
        elif isinstance(outcome, Score):
            self._score(group, sample, outcome)
        elif group.task is not None or (group.is_external and group.batch is None and outcome.final):
            self._fail(group, sample, outcome)

    def _offer(self, outcome: Outcome) -> None:
        """An outcome of an external group that isn't admitted. The first score says how many samples it has; others that say
        something else are late. A failure that is final takes the offer with it; nobody tries an external sample again."""
        offer = self.offers.get(outcome.group)
        if outcome.group in self.closed_external or outcome.lane not in (EXTERNAL, ""):
            self.late += 1
        elif isinstance(outcome, Failure):
            if not outcome.final or (offer is not None and offer.complete):
                self.late += 1
                return
            if offer is None:
                self.offers[outcome.group] = Group(outcome.group, EXTERNAL, 0, math.inf, None, None, [])
            self.refused.setdefault(outcome.group, _FINAL.get(outcome.stage, "failed"))
        elif (offer is None or not offer.size) and not 0 <= outcome.sample < outcome.group_size <= MAX_ATOMIC_MESSAGES:
            self.late += 1
        else:
            size = outcome.group_size
            if offer is None or not offer.size:
                new = Group(outcome.group, EXTERNAL, size, math.inf, None, None, [None] * size)
                if not _belongs(outcome, new):
                    self.late += 1
                    return
                offer = self.offers[outcome.group] = new
            if not _belongs(outcome, offer) or not 0 <= outcome.sample < offer.size or offer.samples[outcome.sample] is not None:
                self.late += 1
                return
            offer.samples[outcome.sample] = Sample(0, 0, 0, 0, scored=scored_from(outcome))
            offer.scores += 1
            self.note_offer(offer, outcome.sample)
            if (fault := _fault(outcome)) is not None:
                self.refused.setdefault(outcome.group, fault)

    def _score(self, group: Group, sample: Sample, score: Score) -> None:
        sample.scored = scored_from(score)
        group.scores += 1
        if group.batch is not None:
            group.pack()  # a replay: CONTROL was read to its end first, and the batch already stands there
            return
        self.failing.pop((group.number, score.sample), None)
        self.stranded.pop((group.number, score.sample), None)
        self.lost.pop((group.number, score.sample), None)
        self.look_for_surplus(group, score.sample)
        if (fault := _fault(score)) is not None:
            self.doom(group, sample, fault)
        elif group.version is not None and sample.scored.versions != (group.version,):
            self.doom(group, sample, "wrong_version")
        self.index_score(group, sample)
        if group.complete:
            if group.is_train:
                self.index_complete(group)
            elif group.version is not None:
                self.eval_scores[group.version] = self.eval_scores.get(group.version, 0) + 1

    def _fail(self, group: Group, sample: Sample, failure: Failure) -> None:
        key = (failure.task_sequence, failure.delivery, failure.stage)
        if sample.failures is None:
            sample.failures = {}
        sample.failures.setdefault(key, failure.stage not in UNCOUNTED_STAGES)
        if failure.final:
            self.doom(group, sample, _FINAL.get(failure.stage, "failed"))
        if sample.failing:
            self.failing[group.number, failure.sample] = None


def _belongs(outcome: Outcome, group: Group) -> bool:
    """Whether it says the group's lane (a failure of a trajectory that can't be read has none); of an external group also its
    size and no task."""
    if group.is_external and isinstance(outcome, Score) and (outcome.group_size, outcome.task_sequence) != (group.size, 0):
        return False
    return outcome.lane in (group.lane, "")


def _fault(score: Score) -> str | None:
    """Why nobody could train on it, whatever its trajectory holds."""
    if not math.isfinite(score.reward):
        return VERIFY_FAILED
    if not score.version_spans or any(span.end <= span.start for span in score.version_spans):
        return _FINAL["malformed"]
    return None
