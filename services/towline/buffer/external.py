"""Groups that come from outside, unasked: which of them are admitted, and which are turned away.

Somebody publishes whole trajectories of lane `external` under a group number below 0; each score says how many samples the group
has. Until all of them are scored the group is only an *offer*: it takes no room, has no deadline, and may come to nothing. A
whole offer is admitted by one atomic batch of `admit` records as soon as the pacing rule (admission.py) has room, the oldest
first and before new prompts; from then on it's a group like any other. What can't be trained any more while it waits, or is more
than one bound's worth ahead of the room, is turned away by a `drop` record as `unpaced`. Either record is final, and later
outcomes of the group are late.
"""

from __future__ import annotations

from itertools import islice

from msgspec import UNSET

from towline.buffer.admission import external_room
from towline.buffer.groups import Group
from towline.buffer.staleness import STALE, over_bound, unfit
from towline.buffer.view import Unit, View
from towline.contract.control import AdmitRecord, DropRecord

UNPACED, END_OF_RUN = "unpaced", "end_of_run"


def turn_away(view: View) -> list[Unit]:
    """The offers that can't, or mustn't, be admitted any more."""
    state, rules = view.state, view.rules
    if not state.offers:
        return []
    reasons = dict(state.refused)
    if not rules.admit_external or view.depth >= rules.steps:
        for number in state.offers:
            reasons.setdefault(number, END_OF_RUN if rules.admit_external else UNPACED)
    judged = {version: over_bound(view, version) for version in state.offered_by}
    for number in dict.fromkeys(n for version, holders in state.offered_by.items() if judged[version] for n in holders):
        if number not in reasons and (reason := _too_old(view, state.offers[number], judged)) is not None:
            reasons[number] = reason
    for waiting, most in (
        (state.whole_offers, external_room(view) + view.most_waiting),
        (state.offers, max(rules.max_open_groups, view.most_waiting)),
    ):
        left = [number for number in waiting if number not in reasons] if len(waiting) > most else []
        for number in left[most:]:
            reasons[number] = UNPACED
    return [(_drop(state.offers[number], reason),) for number, reason in reasons.items()]


def _too_old(view: View, offer: Group, judged: dict[int, str | None]) -> str | None:
    reasons = [reason for version in sorted(offer.versions()) if (reason := judged[version]) is not None]
    hard = [reason for reason in reasons if reason != STALE]
    if hard:
        return hard[0]
    if view.rules.keeps_over_stale:
        return unfit(view, offer) if offer.complete else None
    return UNPACED if offer.complete else STALE


def _drop(offer: Group, reason: str) -> DropRecord:
    return DropRecord(
        writer="", lane=offer.lane, group=offer.number, samples=0, reason=reason, requeue=UNSET, offered=offer.scores
    )


def take_in(view: View) -> list[Unit]:
    """Whole offers, as far as there is room."""
    state = view.state
    if not state.whole_offers:
        return []
    return [_admission(state.offers[number]) for number in islice(state.whole_offers, external_room(view))]


def _admission(offer: Group) -> Unit:
    return tuple(
        AdmitRecord(writer="", lane=offer.lane, group=offer.number, sample=sample, group_size=offer.size)
        for sample in range(offer.size)
    )
