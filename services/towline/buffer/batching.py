"""The next batch: once per (epoch, for_depth), of whole groups, in the order of the run's policy.

`tidying` has dropped every group that mustn't train before this is asked, so what is complete may; a group with tokens over the
bound is among them only where `over_stale` says so, and the record says which rows. A batch may be formed
before the trainer has consumed the one before it; how far ahead, the bound on staleness says.
"""

from __future__ import annotations

from heapq import nsmallest
from typing import Literal

from msgspec import UNSET, UnsetType

from towline.buffer.groups import Group
from towline.buffer.policies.base import Candidate
from towline.buffer.view import Unit, View
from towline.contract.control import BatchRecord, BatchRow, OverStale, OverStaleRow
from towline.errors import InvariantError


def batch(view: View) -> list[Unit]:
    """The next batch if there are groups for it; nothing while no trainer has opened an epoch."""
    state, rules = view.state, view.rules
    depth = state.next_depth
    if view.lineage.newest_epoch is None or depth >= rules.steps or not state.complete:
        return []
    if len(state.complete) < rules.groups_per_batch and not _flush(view):
        return []
    effective = {version: view.lineage.effective_depth(version) for version in state.by_version}
    if _waits_for_tail(view, effective):
        return []
    candidates = (_candidate(state.groups[number], effective) for number in state.complete)
    chosen = nsmallest(rules.groups_per_batch, candidates, key=lambda c: (rules.policy(c), c.number))
    rows, over = _rows(view, [candidate.number for candidate in chosen], effective)
    return [(BatchRecord(writer="", epoch=state.epoch, for_depth=depth, rows=rows, at=view.now, over_stale=over),)]


def _rows(view: View, numbers: list[int], effective: dict[int, int]) -> tuple[tuple[BatchRow, ...], OverStale | UnsetType]:
    """The groups' rows, and which of them hold how many tokens over the bound."""
    state, rules = view.state, view.rules
    depth = state.next_depth
    rows: list[BatchRow] = []
    over: list[OverStaleRow] = []
    for number in numbers:
        for index, scored in state.groups[number].rows():
            least = min(effective[version] for version in scored.versions)
            if depth - least > rules.max_staleness:
                tokens = scored.tokens_below(effective, depth - rules.max_staleness)
                if not rules.keeps_over_stale or tokens is None:
                    raise InvariantError(
                        f"sample {number}.{index} is over the bound: depth {least} for {depth}", code="over_stale"
                    )
                over.append(OverStaleRow(len(rows), tokens))
            rows.append(BatchRow(number, index, scored.sequence, scored.digest, scored.reward, least, scored.policy_tokens))
    if not over:
        return tuple(rows), UNSET
    mode: Literal["mask", "keep"] = "keep" if rules.over_stale == "keep" else "mask"
    return tuple(rows), OverStale(mode=mode, max_staleness=rules.max_staleness, rows=tuple(over))


def _candidate(group: Group, effective: dict[int, int]) -> Candidate:
    scored = [found for _, found in group.rows()]
    return Candidate(
        group.number,
        min(effective[version] for found in scored for version in found.versions),
        tuple(found.reward for found in scored),
        sum(found.policy_tokens for found in scored),
        group.task.reference if group.task is not None else {},
    )


def _waits_for_tail(view: View, effective: dict[int, int]) -> bool:
    """Whether a group that has its last chance in this batch lacks samples, and is young enough to be waited for."""
    state, rules = view.state, view.rules
    if not rules.tail_wait_seconds or view.out_of_data:
        return False
    for version, holders in state.by_version.items():
        if effective[version] != state.next_depth - rules.max_staleness:
            continue
        for number in holders:
            task = state.groups[number].task
            if number not in state.complete and task is not None and task.admitted_at + rules.tail_wait_seconds > view.now:
                return True
    return False


def _flush(view: View) -> bool:
    """Whether a batch may be smaller: the prompts have ended and every group is in, or resampling gives no more."""
    ended = view.out_of_data and len(view.state.complete) == len(view.state.open_train)
    return (ended or view.resampled_out) and len(view.state.complete) >= view.rules.min_batch_groups
