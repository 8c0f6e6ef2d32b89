"""Lane eval: the tasks of each eval version on the line, once, and the record that closes its evaluation.

Every version gets the same prompts with the same seeds, so that two evaluations differ by the policy alone.
"""

from __future__ import annotations

from towline.buffer.admission import group_unit
from towline.buffer.view import Unit, View, seed_of
from towline.contract.control import EvalRecord, EvalRow
from towline.contract.task import EVAL, Cursor, Task, pack_tokens
from towline.environment.prompts import draw
from towline.store.lineage import is_eval_version


def wanted_groups(view: View) -> int:
    return min(view.rules.eval_prompts, len(view.sources.evaluation))


def to_issue(view: View) -> list[int]:
    """Eval versions of the line that lack groups, in order.

    Numbers only grow, so those below the newest one issued were judged when they were new: settings that change during a run
    don't call old versions back.
    """
    state, rules, lineage = view.state, view.rules, view.lineage
    if rules.eval_every <= 0:
        return []
    wanted = wanted_groups(view)
    found = []
    newest = state.newest_eval
    for version in lineage.line_from(lineage.effective_depth(newest) if newest in lineage else 0):
        if version < newest or version in state.evals or state.eval_groups.get(version, 0) >= wanted:
            continue
        if is_eval_version(lineage, version, rules.eval_every, rules.steps):
            found.append(version)
    return found


def issue(view: View) -> list[Unit]:
    """The groups that the first such version lacks: all of them, or after a crash the rest."""
    versions = to_issue(view)
    if not versions:
        return []
    version, state, rules = versions[0], view.state, view.rules
    units: list[Unit] = []
    for place in range(state.eval_groups.get(version, 0), wanted_groups(view)):
        prompt, cursor = draw(view.sources.evaluation, Cursor(0, place))
        task = Task(
            run=rules.run,
            lane=EVAL,
            group=state.next_group + len(units),
            sample=0,
            group_size=rules.eval_samples,
            prompt=pack_tokens(prompt.tokens),
            prompt_ref=prompt.ref,
            cursor=cursor,
            reference=prompt.reference,
            environment=rules.environment,
            sampling=rules.eval_sampling,
            seed=0,
            not_before_depth=view.lineage.depth(version),
            exact_version=version,
            admitted_at=view.now,
            deadline=view.now + rules.eval_deadline_seconds,
        )
        units.append(group_unit(task, [seed_of(rules.seed, EVAL, place, i) for i in range(rules.eval_samples)]))
    return units


def close(view: View) -> list[Unit]:
    """The evaluations whose every group is complete or dropped, with the mean over what was evaluated."""
    state, lineage = view.state, view.lineage
    pending = set(to_issue(view))
    units: list[Unit] = []
    for version, issued in state.eval_groups.items():
        open_groups = state.open_eval.get(version, {})
        if version in pending or state.eval_scores.get(version, 0) < len(open_groups):
            continue
        rows = tuple(
            EvalRow(number, index, scored.sequence, scored.digest, scored.reward)
            for number in sorted(open_groups)
            for index, scored in state.groups[number].rows()
        )
        mean = sum(row.reward for row in rows) / len(rows) if rows else None
        units.append(
            (
                EvalRecord(
                    writer="",
                    version=version,
                    depth=lineage.depth(version),
                    wanted=issued * view.rules.eval_samples,
                    rows=rows,
                    mean=mean,
                ),
            )
        )
    return units
