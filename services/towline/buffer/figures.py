"""The state in numbers, for the status entry and /metrics, and the named state that the run is waiting in."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from towline.buffer.evaluations import to_issue
from towline.buffer.external import UNPACED
from towline.buffer.fleet import Fleet
from towline.buffer.state import State
from towline.buffer.totals import Totals
from towline.buffer.view import View
from towline.contract.task import SESSION
from towline.store.lineage import Lineage

COMMIT_SECONDS = 300.0
"""A batch that has waited this long for the version that consumes it is worth a name."""
CLAIM_SECONDS = 15.0
"""So are groups that clients haven't finished for so long, where nothing else is under way."""


def figures(state: State, lineage: Lineage, steps: int) -> dict[str, Any]:
    """What docs/design/002-interfaces.md lists, and a few more."""
    depth = lineage.depth(lineage.latest) if 0 in lineage else 0
    totals = state.totals
    ahead = (state.batches[at] for at in range(depth, state.next_depth) if at in state.batches)
    trained = totals.samples - sum(batch.samples for batch in ahead)
    dropped = dict(sorted(state.dropped.items()))
    on_line = [
        [version, at, mean]
        for version, (at, mean) in sorted(state.evals.items())
        if mean is not None and lineage.on_line(version)
    ]
    return {
        "depth": depth,
        "epoch": state.epoch,
        "steps": steps,
        "admitted": state.admitted,
        "trained": trained,
        "evaluated": state.evaluated,
        "open": state.admitted - trained - state.evaluated - sum(dropped.values()),
        "open_groups": len(state.open_train),
        "complete_groups": len(state.complete),
        "batches": state.next_depth,
        "dropped": dropped,
        "late": state.late,
        "unpaced": state.turned_away.get(UNPACED, 0),
        "turned_away": dict(sorted(state.turned_away.items())),
        "offered_groups": len(state.offers),
        "staleness": staleness(totals.staleness),
        "staleness_counts": {str(depths): samples for depths, samples in sorted(totals.staleness.items())},
        "over_stale": {"samples": totals.over_samples, "tokens": totals.over_tokens, "max": totals.over_most},
        "requeue": len(state.requeue),
        "requeued_on_request": len(state.requeued),
        "resampled": state.resampled,
        "mixed_version_share": state.mixed_samples / state.scored_samples if state.scored_samples else 0.0,
        **length_bias(state, totals),
        "reward_first": on_line[0][2] if on_line else None,
        "reward_last": on_line[-1][2] if on_line else None,
        "evals": [[version, at, mean] for version, (at, mean) in sorted(state.evals.items())],
    }


def staleness(counts: Mapping[int, int]) -> Mapping[str, float]:
    """Of samples within the bound, counted by their staleness in depths: mean, 99th percentile (nearest rank) and greatest."""
    total = sum(counts.values())
    if not total:
        return {"mean": 0.0, "p99": 0, "max": 0}
    rank, seen, p99 = -(-99 * total // 100), 0, 0
    for age in sorted(counts):
        seen += counts[age]
        if seen >= rank:
            p99 = age
            break
    return {"mean": sum(age * n for age, n in counts.items()) / total, "p99": p99, "max": max(counts)}


def length_bias(state: State, totals: Totals) -> dict[str, float | None]:
    """Mean policy tokens of the samples in standing batches and of all that were scored; their ratio is 1 where what is
    trained is as long as what the policy writes. A policy that drops long samples shows here."""
    trained = (totals.tokens + totals.over_sample_tokens) / totals.samples if totals.samples else None
    scored = state.scored_tokens / state.scored_samples if state.scored_samples else None
    return {
        "tokens_trained_mean": trained,
        "tokens_scored_mean": scored,
        "staleness_token_mean": totals.token_staleness / totals.tokens if totals.tokens else 0.0,
        "length_bias": trained / scored if trained is not None and scored else None,
    }


LOOKED_AT = 1000
"""Open groups that are asked which version they wait for: the oldest ones, which need no fresher one than the others."""
HANGING = ("no_trainer", "no_eligible_replica", "commit_failed", "bus_full", "no_base_model")
"""Named states in which the run waits for somebody to do something about it: not ready."""


def waiting_for(view: View, fleet: Fleet, *, batch_waits_seconds: float) -> str:
    """The named state, as `name: what it means`; empty while everything moves.

    `batch_waits_seconds` says how long the oldest unconsumed batch has stood.
    """
    state = view.state
    if view.finished:
        return f"finished: {view.goal}"
    if view.lineage.newest_epoch is None:
        return "no_trainer: the LOG has no open entry; start the trainer"
    if batch_waits_seconds > COMMIT_SECONDS:
        return (
            f"commit_failed: batch {view.depth} has waited {batch_waits_seconds:.0f} s for its version; see trainer and publisher"
        )
    generating = (number for number in state.open_train if number not in state.complete)
    least = min((_least_wanted(state, number) for number in islice(generating, LOOKED_AT)), default=None)
    if least is not None and not fleet.eligible(view.lineage, least):
        return f"no_eligible_replica: groups wait for a rollout worker that serves depth {least} or more"
    if state.open_eval and not fleet.replicas:
        return "no_eligible_replica: an evaluation waits for a rollout worker"
    if (claimable := _unclaimed(view)) and view.depth >= state.next_depth:
        return (
            f"claims_awaited: {claimable} groups of lane session, and no others, are open; their samples wait for clients of a "
            "gateway (POST /tasks/claim) to finish them"
        )
    if view.out_of_data and view.goal is None:
        return "end_of_data: the prompts have ended; what is open is trained, in a partial batch at last"
    if view.goal is not None and (state.eval_groups or to_issue(view)):
        return "last_evaluation: every step is trained; the last version is being evaluated"
    return ""


def _unclaimed(view: View) -> int:
    """How many groups wait for clients, where none waits for workers and the oldest has waited for a while."""
    state = view.state
    open_groups = [state.groups[number] for number in islice(state.open_train, LOOKED_AT) if number not in state.complete]
    if any(group.lane != SESSION for group in open_groups):
        return 0
    waits = (view.now - group.task.admitted_at for group in open_groups if group.task is not None)
    return len(open_groups) if max(waits, default=0.0) > CLAIM_SECONDS else 0


def _least_wanted(state: State, number: int) -> int:
    samples = state.groups[number].samples
    return min((s.not_before_depth for s in samples if s is not None and s.scored is None), default=0)
