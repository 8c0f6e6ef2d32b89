"""Staleness, decided here and only here: which versions' tokens are over the bound for the next batch, and what of a group is
left.

The next batch's depth - the version's effective depth <= max_staleness. With `over_stale` = mask_stale_tokens or keep a group
over it is batched all the same, and the batch record says which rows hold how many such tokens.
"""

from __future__ import annotations

from towline.buffer.groups import Group
from towline.buffer.view import View
from towline.errors import MissingError

STALE, OFF_LINE, UNKNOWN_VERSION, ALL_MASKED = "stale", "off_line", "unknown_version", "all_masked"


def over_bound(view: View, version: int) -> str | None:
    """Why tokens of this version aren't fit for the next batch, or None."""
    lineage, rules, next_depth = view.lineage, view.rules, view.state.next_depth
    try:
        if not rules.keep_off_line and not lineage.on_line(version):
            return OFF_LINE
        depth = lineage.effective_depth(version)
    except MissingError:
        return UNKNOWN_VERSION  # the LOG was read again before this was asked: nobody can have served it
    if next_depth < rules.steps and next_depth - depth > rules.max_staleness:
        return STALE
    return None


def unfit(view: View, group: Group) -> str | None:
    """Why a whole group that holds tokens over the bound can't be trained even so, where the rules keep such groups; or None.

    `all_masked`: no policy token of any of its samples would be left. `stale`: how many are over the bound isn't known, since the
    scores come from a snapshot of a release that didn't count them.
    """
    least = view.state.next_depth - view.rules.max_staleness
    effective = {version: view.lineage.effective_depth(version) for version in group.versions()}
    scores = [scored for _, scored in group.rows()]
    over = [scored.tokens_below(effective, least) for scored in scores]
    if None in over:
        return STALE
    if view.rules.over_stale == "mask_stale_tokens" and over == [scored.counted_tokens for scored in scores]:
        return ALL_MASKED
    return None
