"""What became of a sample, in a sentence that a person can act on."""

from __future__ import annotations

from towline.config import Settings
from towline.contract.groups import is_external
from towline.trace.life import BatchSeen, Fate, Life, VersionSeen

DROPPED = {
    "deadline": "its group wasn't complete within buffer.group_deadline_seconds",
    "attempts": "one of its samples failed buffer.max_attempts times",
    "failed": "one of its samples failed for good, as nothing would have mended it",
    "malformed": "a sample's trajectory couldn't be decoded",
    "verify_failed": "a sample of the group couldn't be scored",
    "verify_failed_all": "reward.max_failed_groups groups in a row couldn't be scored, and the run ended",
    "stale": "a token's version was more than buffer.max_staleness depths behind the next batch",
    "off_line": "a token's version went off the line, and buffer.off_line drops such groups",
    "unknown_version": "it names a version that the LOG doesn't have",
    "all_masked": "every token of the group was over the bound, so that masking left nothing to train on",
    "wrong_version": "a sample came from another version than the one to be evaluated",
    "version_gone": "the version to be evaluated can't be had any more, or took longer than eval.deadline_seconds",
    "trajectory_lost": "a sample's trajectory was lost with the end of its stream",
    "equal_rewards": "every sample had the same reward, which teaches nothing, and buffer.filter_equal_rewards is on",
    "max_resample_rounds": "in buffer.max_resample_rounds rounds fewer groups than buffer.min_batch_groups had a signal",
    "min_batch_groups": "the prompts ended with fewer groups left than buffer.min_batch_groups",
    "unpaced": "a group from outside: nothing had room for it, or buffer.external turns such groups away",
    "end_of_run": "the run had all its steps before the group was batched",
}
"""Reason of a drop -> what it means."""


def explain(life: Life, settings: Settings) -> tuple[Fate, str]:
    """The fate, and why. The standing batch decides first, then a drop, an evaluation, and what is still missing."""
    fate, text = _explain(life, settings)
    decided = fate not in ("scored", "generated", "open")
    if decided or life.attempts or life.control_begins == 1 or is_external(life.group):
        return fate, text
    return fate, f"{text}, or its end was decided before CONTROL {life.control_begins}, where what is left of CONTROL begins"


def _explain(life: Life, settings: Settings) -> tuple[Fate, str]:
    batch = life.batch
    if batch is not None:
        return _batched(life, batch)
    if life.evaluated_version is not None:
        mean = "" if life.evaluated_mean is None else f", whose mean reward is {life.evaluated_mean:.4f}"
        return "evaluated", f"counts in the evaluation of version {life.evaluated_version}{mean}"
    if life.dropped is not None:
        return "dropped", _dropped(life, life.dropped)
    if life.score is not None:
        scored = len(life.group_rewards)
        if scored < life.group_size:
            return "scored", f"waits for its group: {scored} of {life.group_size} samples are scored"
        return "scored", f"its group is complete and waits for a batch of {settings.buffer.groups_per_batch} groups"
    final = [failure for failure in life.failures if failure.final]
    if final:
        return "open", f"failed for good ({final[-1].stage}: {final[-1].reason}); the buffer drops its group next"
    if life.trajectory is not None or life.malformed is not None:
        return "generated", "its trajectory is in the stream and waits for the reward service"
    return "open", _waiting(life)


def _batched(life: Life, batch: BatchSeen) -> tuple[Fate, str]:
    where = f"batch {batch.epoch}/{batch.for_depth} (step {batch.for_depth}), {batch.staleness} steps old"
    void = [other for other in life.batches if other.void_by is not None]
    after = f"; {len(void)} earlier batches with it were voided by forks" if void else ""
    if life.version is None:
        return "batched", f"in {where}; no version of it is committed yet{after}"
    version: VersionSeen = life.version
    into = f"version {version.number} (depth {version.depth})"
    if not batch.same_bytes:
        return "missing", f"in {where}, but the bytes that the batch names aren't in the stream: {into} was trained without it"
    if version.skipped:
        return (
            "skipped",
            f"in {where}, which changed nothing (no signal, no rows or numbers that weren't finite); then {into}{after}",
        )
    rewards = set(life.group_rewards.values())
    signal = ""
    if len(rewards) == 1 and len(life.group_rewards) == life.group_size:
        signal = "; every sample of its group has the same reward, so its advantage is 0"
    lost = f"; {version.missing_rows} rows of that version were missing" if version.missing_rows else ""
    over = ""
    if batch.over_stale is not None:
        done = "had no gradient" if batch.over_stale == "mask" else "were trained all the same"
        over = f"; {batch.over_stale_tokens} of its tokens were over the staleness bound and {done}"
    return "trained", f"in {where}, trained into {into}{signal}{over}{lost}{after}"


def _dropped(life: Life, reason: str) -> str:
    """Why, what this sample had to do with it, and where its prompt went."""
    text = _why(life, reason)
    if life.prompt_again_in is not None:
        return f"{text}; its prompt is in group {life.prompt_again_in} again"
    return f"{text}; its prompt is admitted again, as a new group" if life.requeued else text


def _why(life: Life, reason: str) -> str:
    text = f"its group was {'dropped' if life.admitted else 'turned away'}: {reason}"
    if reason in DROPPED:
        text += f" ({DROPPED[reason]})"
    own = life.failures[-1] if life.failures else None
    if own is not None:
        return f"{text}; its own last failure was {own.stage}: {own.reason}"
    if life.malformed is not None:
        return f"{text}; its trajectory can't be decoded: {life.malformed}"
    if life.score is not None:
        missing = life.group_size - len(life.group_rewards)
        return (
            f"{text}; it was scored itself, {missing} of its group weren't" if missing else f"{text}; the whole group was scored"
        )
    if life.trajectory is not None:
        return f"{text}; it was generated, never scored"
    return f"{text}; no trajectory of it ever came"


def _waiting(life: Life) -> str:
    newest = life.attempts[-1] if life.attempts else None
    text = "no trajectory of it is in the stream"
    if newest is None:
        return text
    if newest.cancelled is not None:
        return f"{text}; its task at CONTROL {newest.task_sequence} was cancelled ({newest.cancelled})"
    what = (
        f"of version {newest.exact_version}"
        if newest.exact_version is not None
        else f"of depth {newest.not_before_depth} or more"
    )
    failed = f"; {len(life.failures)} attempts failed, the last with {life.failures[-1].stage}" if life.failures else ""
    return f"{text}: its task waits for a worker {what}, or is being generated{failed}"
