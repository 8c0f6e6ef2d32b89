"""Groups that come from outside, unasked: which of them are admitted, and which are turned away.

Somebody publishes whole trajectories of lane `external` under a group number below 0; each score says how many samples the group
has. Until all of them are scored the group is only an *offer*: it takes no room, has no deadline, and may come to nothing. A
whole offer is admitted by one atomic batch of `admit` records as soon as the pacing rule (admission.py) has room, the oldest
first and before new prompts; from then on it's a group like any other. What can't be trained any more while it waits, or is more
than one bound's worth ahead of the room, is turned away by a `drop` record as `unpaced`. Either record is final, and later
outcomes of the group are late.
"""

from __future__ import annotations

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
    reasons: dict[int, str] = dict(state.refused)
    if not state.offers:
        return []
    judged = {version: over_bound(view, version) for version in state.offered_versions()}
    places = external_room(view) + view.most_waiting
    for count, (number, offer) in enumerate(state.offers.items()):
        if number in reasons:
            continue
        reason = _why_not(view, offer, judged)
        if reason is None:
            places -= offer.complete
            if places < 0 or count >= rules.max_open_groups:
                reason = UNPACED
        if reason is not None:
            reasons[number] = reason
    return [(_drop(state.offers[number], reason),) for number, reason in reasons.items()]


def _why_not(view: View, offer: Group, judged: dict[int, str | None]) -> str | None:
    rules = view.rules
    if not rules.admit_external:
        return UNPACED
    if view.depth >= rules.steps:
        return END_OF_RUN
    reasons = [reason for version in sorted(offer.versions()) if (reason := judged[version]) is not None]
    hard = [reason for reason in reasons if reason != STALE]
    if hard:
        return hard[0]
    if not reasons:
        return None
    if rules.keeps_over_stale:
        return unfit(view, offer) if offer.complete else None
    return UNPACED if offer.complete else STALE


def _drop(offer: Group, reason: str) -> DropRecord:
    return DropRecord(
        writer="", lane=offer.lane, group=offer.number, samples=0, reason=reason, requeue=UNSET, offered=offer.scores
    )


def take_in(view: View) -> list[Unit]:
    """Whole offers, as far as there is room."""
    whole = [offer for offer in view.state.offers.values() if offer.complete]
    return [
        tuple(
            AdmitRecord(writer="", lane=offer.lane, group=offer.number, sample=sample, group_size=offer.size)
            for sample in range(offer.size)
        )
        for offer in whole[: external_room(view)]
    ]
