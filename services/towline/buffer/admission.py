"""How many groups may be under way, and the tasks of a new one.

Pacing comes before discarding: a group is admitted only when the bound on staleness leaves room for it to be trained. Let

    depth    the LOG's: batches consumed along the lineage
    waiting  train groups admitted, not dropped, and not consumed in that lineage: open ones, and those of the batches at or
             above `depth`, which the trainer has yet to commit
    ahead    min(1 + max_staleness, steps - depth): the batches that a sample begun now, by a version of this depth, may
             still reach within the bound and within the run

    allowance = min(ahead * groups_per_batch - waiting, max_open_groups - open groups), never below 0

With full batches depth * groups_per_batch groups are consumed, so this is DESIGN 5's rule

    admitted - dropped <= (depth + 1 + max_staleness) * groups_per_batch

It is counted from what waits rather than from what was consumed, so that it holds in three more cases: a partial batch uses up
its depth and what it lacked isn't admitted on top; a dropped group leaves `waiting` at once; a fork lowers the depth and puts
the groups of the voided batches back into `waiting`, which may exceed the room for a while: then nothing is admitted.

Example: groups_per_batch 4, max_staleness 1, steps 100. At depth 0: 2 * 4 = 8 groups are admitted. The batch for depth 0 is
formed: 4 open + 4 batched = 8, no room. Two open groups are dropped: 6, so 2 are admitted. The LOG reaches depth 1: the first
batch is consumed, 4 wait, 4 are admitted. A fork back to depth 0 voids it: 4 + 8 = 12 > 8; nothing is admitted until the
batch for depth 0, formed anew, is consumed. At depth 99 one batch is left: 4 groups, whatever the staleness.

With oversampling or dynamic filtering, `groups_per_batch` above is admitted_per_batch = ceil(groups_per_batch * oversample): the
surplus is never trained and becomes stale. Prompts of requeued groups come before new ones. External groups (external.py) take
room before new prompts; where `external_groups` names their share of each batch, the share bounds both sides. So does
`session_groups` for the groups of lane session: prompts as the others, whose samples clients claim. limiter.py says the same
rule as a rate limiter with samples-per-insert 1 and a band of ahead * admitted_per_batch groups.

The place in the queue gives a task its not_before_depth: the i-th waiting group (from 0) is trained at depth + i //
groups_per_batch at the earliest, so a version max_staleness below that, and no fresher one, is what it needs.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from towline.buffer.limiter import pacing
from towline.buffer.sites import spread
from towline.buffer.view import Unit, View, seed_of
from towline.contract.control import TaskRecord
from towline.contract.task import SESSION, TRAIN, Task, pack_tokens
from towline.environment.prompts import Prompt, draw, exhausted


def room(view: View) -> int:
    """How many groups may be admitted now, from wherever they come."""
    if view.resampled_out or view.unjudgeable:
        return 0
    paced = view.pacing.insertable(view.state.waiting_groups(view.depth))
    return max(0, min(paced, view.rules.max_open_groups - len(view.state.open_train)))


def allowance(view: View) -> int:
    """How many groups may be admitted now for prompts of lane train."""
    rules, state, depth = view.rules, view.state, view.depth
    if not rules.external_groups and not rules.session_groups:
        return room(view)
    waiting = state.waiting_groups(depth)
    if rules.external_groups:
        waiting -= state.waiting_external(depth)
    if rules.session_groups:
        waiting -= state.waiting_session(depth)
    return _share(view, rules.admitted_per_batch - rules.external_groups - rules.session_groups, waiting)


def session_allowance(view: View) -> int:
    """How many groups may be admitted now for prompts of lane session."""
    if not view.rules.session_groups:
        return 0
    return _share(view, view.rules.session_groups, view.state.waiting_session(view.depth))


def lanes(view: View) -> list[str]:
    """The lanes of the groups that may be admitted now for prompts, in order: evenly mixed."""
    claimed = session_allowance(view)
    total = min(claimed + allowance(view), room(view))
    claimed = min(claimed, total)
    return [SESSION if (i + 1) * claimed // total > i * claimed // total else TRAIN for i in range(total)]


def external_room(view: View) -> int:
    """How many groups may be admitted now from outside: their share, or all the room where none was named."""
    if not view.rules.external_groups:
        return room(view)
    return _share(view, view.rules.external_groups, view.state.waiting_external(view.depth))


def _share(view: View, groups_per_batch: int, waiting: int) -> int:
    rules = view.rules
    limiter = pacing(groups_per_batch=groups_per_batch, max_staleness=rules.max_staleness, batches_left=rules.steps - view.depth)
    return min(room(view), limiter.insertable(waiting))


def admit(view: View) -> list[Unit]:
    """New groups, each a unit of its samples' tasks."""
    rules, state, source = view.rules, view.state, view.sources.train
    cursor, depth = state.cursor, view.depth
    waiting = state.waiting_groups(depth)
    waiting_again = iter(state.requeue.items())
    units: list[Unit] = []
    allowed = lanes(view)
    sites = iter(spread(view, allowed.count(TRAIN)))
    for place, lane in enumerate(allowed, start=waiting):
        again = next(waiting_again, None)
        if again is not None:
            prompt = Prompt(again[1].prompt_tokens.tolist(), again[1].prompt_ref, again[1].reference)
        elif exhausted(source, cursor):
            break
        else:
            prompt, cursor = draw(source, cursor)
        group = state.next_group + len(units)
        task = Task(
            run=rules.run,
            lane=lane,
            group=group,
            sample=0,
            group_size=rules.group_size,
            prompt=pack_tokens(prompt.tokens),
            prompt_ref=prompt.ref,
            cursor=cursor,
            reference=prompt.reference,
            environment=rules.session_environment if lane == SESSION else rules.environment,
            sampling=rules.sampling,
            seed=0,
            not_before_depth=max(0, depth + place // rules.admitted_per_batch - rules.max_staleness),
            admitted_at=view.now,
            deadline=view.now + rules.group_deadline_seconds,
            site=(next(sites) or UNSET) if lane == TRAIN else UNSET,
        )
        units.append(group_unit(task, [seed_of(rules.seed, TRAIN, group, i) for i in range(rules.group_size)],
                                requeues=UNSET if again is None else again[0]))  # fmt: skip
    return units


def group_unit(task: Task, seeds: list[int], *, requeues: int | UnsetType = UNSET) -> Unit:
    """The tasks of one group, which differ in sample and seed."""
    fields = {name: getattr(task, name) for name in task.__struct_fields__}
    return tuple(
        TaskRecord(writer="", task=Task(**(fields | {"sample": index, "seed": seed})), requeues=requeues)
        for index, seed in enumerate(seeds)
    )
