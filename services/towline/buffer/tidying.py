"""What ends early or is missing: drops, cancels, and samples to issue again.

A drop is preceded by the cancels of its group's tasks that may still be generated, so that a crash between them leaves a group
that is dropped all the same after the restart: every reason below still holds then.
"""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from towline.buffer.groups import Group, Sample
from towline.buffer.sites import SILENT, unheard
from towline.buffer.staleness import STALE, over_bound, unfit
from towline.buffer.state import EQUAL_REWARDS
from towline.buffer.view import Unit, View
from towline.contract.control import VERIFY_FAILED_ALL, CancelRecord, DropRecord, ReissueRecord

DEADLINE, ATTEMPTS, VERSION_GONE, END_OF_RUN = "deadline", "attempts", "version_gone", "end_of_run"
MAX_RESAMPLE_ROUNDS, MIN_BATCH_GROUPS = "max_resample_rounds", "min_batch_groups"


def tidy(view: View) -> list[Unit]:
    """Drops first, then what is missing in the groups that stay, then tasks that nobody needs any more."""
    state = view.state
    reasons = _doomed(view)
    units: list[Unit] = []
    for number, reason in reasons.items():
        requeue = reason == STALE and view.rules.over_stale == "requeue"
        units.extend(_drop(state.groups[number], reason, requeue=requeue))
    for number, index in dict.fromkeys([*state.failing, *state.stranded, *state.lost, *unheard(view)]):
        if number not in reasons:
            units.extend(_reissue(view, state.groups[number], index))
    for number, index in state.surplus:
        sample = state.groups[number].samples[index]
        if number not in reasons and sample is not None:
            units.append((_cancel(number, index, sample, "scored"),))
    return units


def _doomed(view: View) -> dict[int, str]:
    """Group -> why it must go; the first reason found stands."""
    state, rules = view.state, view.rules
    reasons = dict(state.doomed)
    for number in state.overdue(view.now):
        reasons.setdefault(number, DEADLINE if state.groups[number].is_train else VERSION_GONE)
    over: dict[int, None] = {}
    for version, holders in state.by_version.items():
        reason = over_bound(view, version) if holders else None
        if reason == STALE and rules.keeps_over_stale:
            over.update(holders)
        elif reason is not None:
            for number in holders:
                reasons.setdefault(number, reason)
    for number in over:
        if number in state.complete and (reason := unfit(view, state.groups[number])) is not None:
            reasons.setdefault(number, reason)
    for version, numbers in state.open_eval.items():
        if not view.lineage.on_line(version):
            for number in numbers:
                if not state.groups[number].complete:
                    reasons.setdefault(number, VERSION_GONE)
    for number, index in state.failing:
        sample = state.groups[number].samples[index]
        if sample is not None and sample.attempts >= rules.max_attempts:
            reasons.setdefault(number, ATTEMPTS)
    if rules.filter_equal_rewards:
        for number in state.flat:
            reasons.setdefault(number, EQUAL_REWARDS)
    left = [number for number in state.complete if number not in reasons] if view.out_of_data or view.resampled_out else []
    if view.resampled_out and len(left) < rules.min_batch_groups:
        for number in state.open_train:
            reasons.setdefault(number, MAX_RESAMPLE_ROUNDS)
    elif view.out_of_data and len(left) == len(state.open_train) and len(left) < rules.min_batch_groups:
        for number in left:
            reasons.setdefault(number, MIN_BATCH_GROUPS)
    if view.unjudgeable:
        for number in state.open_train:
            reasons.setdefault(number, VERIFY_FAILED_ALL)
    if view.depth >= rules.steps:
        for number in state.open_train:
            reasons.setdefault(number, END_OF_RUN)
    return reasons


def _drop(group: Group, reason: str, *, requeue: bool = False) -> list[Unit]:
    units: list[Unit] = [
        (_cancel(group.number, index, sample, reason),)
        for index, sample in enumerate(group.samples)
        if sample is not None and sample.scored is None and not sample.failing and group.task is not None
    ]
    again = True if requeue and group.task is not None else UNSET
    record = DropRecord(writer="", lane=group.lane, group=group.number, samples=group.size, reason=reason, requeue=again)
    return [*units, (record,)]


def _cancel(number: int, index: int, sample: Sample, reason: str) -> CancelRecord:
    return CancelRecord(writer="", group=number, sample=index, task_sequence=sample.task_sequence, reason=reason)


def _reissue(view: View, group: Group, index: int) -> list[Unit]:
    """The missing sample alone. Its old task is cancelled: another delivery of it may still be running."""
    sample, task, rules = group.samples[index], group.task, view.rules
    if sample is None or task is None:
        return []
    key = (group.number, index)
    reason = "fork" if key in view.state.stranded else "lost" if key in view.state.lost else _newest_stage(sample)
    not_before = sample.not_before_depth
    if group.is_train:
        least = max(0, view.depth - rules.max_staleness)
        not_before = max(min(not_before, view.state.fork_depth) if reason == "fork" else not_before, least)
    silent = sample.site in view.presence.silent
    if silent and reason == "missing":
        reason = SILENT
    again = replace(
        task,
        sample=index,
        seed=sample.seed,
        attempt=sample.attempt + 1,
        not_before_depth=not_before,
        site=UNSET if silent else sample.site or UNSET,
    )  # the same seed: whoever takes it goes on from the sample's PARTIAL, if there is one
    return [(_cancel(group.number, index, sample, reason),), (ReissueRecord(writer="", task=again, reason=reason),)]


def _newest_stage(sample: Sample) -> str:
    return next((stage for sequence, _, stage in reversed(sample.failures or {}) if sequence == sample.task_sequence), "missing")
