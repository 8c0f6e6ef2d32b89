"""Missing samples: issued again alone, or their group ends for a named reason."""

from __future__ import annotations

from towline.contract.control import CancelRecord, DropRecord, ReissueRecord
from unit.buffer.world import kinds, only, started


def test_a_failed_sample_is_issued_again_alone_and_whole() -> None:
    world = started()
    before = world.task_sequence(0, 1)
    world.failed(0, 1)
    records = world.settle()
    assert kinds(records) == ["cancel", "reissue"]
    cancel, again = records
    assert isinstance(cancel, CancelRecord)
    assert cancel.task_sequence == before
    assert isinstance(again, ReissueRecord)
    first = world.tasks()[1]
    assert (again.task.group, again.task.sample, again.task.attempt, again.reason) == (0, 1, 1, "generate")
    assert (again.task.prompt, again.task.seed, again.task.sampling) == (first.prompt, first.seed, first.sampling)
    assert again.task.deadline == first.deadline
    assert world.settle() == []


def test_a_failure_counts_once_per_task_delivery_and_stage() -> None:
    world = started(max_attempts=3)
    sequence = world.task_sequence(0, 0)
    for _ in range(5):
        world.failed(0, 0, task_sequence=sequence)
    assert kinds(world.settle()) == ["cancel", "reissue"]
    world.failed(0, 0, task_sequence=sequence)
    assert world.settle() == []
    sample = world.state.groups[0].samples[0]
    assert sample is not None
    assert sample.attempts == 1
    world.failed(0, 0, task_sequence=sequence, delivery=2)
    assert sample.attempts == 2
    assert world.settle() == []  # of a task that was superseded: counted, and nothing more


def test_too_many_attempts_drop_the_group_and_admit_another() -> None:
    world = started(max_attempts=3)
    for _ in range(3):
        world.failed(0, 0)
        records = world.settle()
    drop = only(records, DropRecord)[0]
    assert (drop.group, drop.samples, drop.reason) == (0, 2, "attempts")
    assert world.open_groups() == [1, 2]
    assert len(only(world.records(), ReissueRecord)) == 2


def test_waiting_in_vain_for_a_version_is_no_attempt() -> None:
    world = started(max_attempts=2)
    for _ in range(6):
        world.failed(0, 0, "not_ready")
        assert kinds(world.settle()) == ["cancel", "reissue"]
    assert world.drops() == []


def test_final_failures_drop_the_group_at_once_and_cancel_what_is_out() -> None:
    world = started()
    world.outcome(world.score(0, 0))
    out = world.task_sequence(1, 0)
    world.failed(1, 1, "malformed", final=True)
    records = world.settle()
    assert kinds(records) == ["cancel", "drop", "task", "task"]
    assert records[0].task_sequence == out  # type: ignore[attr-defined]
    world.failed(0, 1, "verify", final=True)
    world.failed(2, 0, "generate", final=True)
    world.settle()
    assert world.drops() == [(1, "malformed"), (0, "verify_failed"), (2, "failed")]
    assert world.state.waiting_groups(0) == 2


def test_the_deadline_ends_a_group_that_is_not_whole_and_spares_one_that_is() -> None:
    world = started(group_deadline_seconds=100.0)
    world.scored(0)
    world.outcome(world.score(1, 0))
    world.now += 99.9
    assert world.settle() == []
    world.now += 0.2
    assert kinds(world.settle()) == ["cancel", "drop", "task", "task"]
    assert world.drops() == [(1, "deadline")]
    assert world.open_groups() == [0, 2]


def test_a_late_outcome_is_counted_and_never_used() -> None:
    world = started()
    late = world.score(0, 0)
    world.failed(0, 1, "malformed", final=True)
    world.settle()
    facts = (world.state.admitted, dict(world.state.dropped), world.open_groups())
    world.outcome(late)
    world.outcome(world.score(1, 0))
    world.outcome(world.score(1, 0, reward=9.0))
    assert world.state.late == 2
    assert world.settle() == []
    assert (world.state.admitted, world.state.dropped, world.open_groups()) == facts
    scored = world.state.groups[1].samples[0]
    assert scored is not None
    assert scored.scored is not None
    assert scored.scored.reward == 1.0


def test_an_outcome_of_a_group_that_was_never_admitted_is_late() -> None:
    world = started()
    world.outcome(world.score(77, 0, task_sequence=1))
    assert world.state.late == 1
    assert world.settle() == []


def test_the_first_workers_trajectory_wins_though_its_task_was_superseded() -> None:
    world = started()
    first = world.task_sequence(0, 0)
    world.failed(0, 0, "not_ready")
    world.settle()
    second = world.task_sequence(0, 0)
    world.outcome(world.score(0, 0, task_sequence=first))
    records = world.settle()
    assert kinds(records) == ["cancel"]
    assert records[0].task_sequence == second  # type: ignore[attr-defined]
    assert world.settle() == []
    world.outcome(world.score(0, 1))
    world.scored(1)
    world.settle()
    assert {(row.group, row.sample) for row in world.batches()[0].rows} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_failure_after_the_score_changes_nothing() -> None:
    world = started()
    world.outcome(world.score(0, 0))
    world.failed(0, 0, final=True)
    assert world.settle() == []


def test_a_reward_that_is_no_number_fails_its_group() -> None:
    world = started()
    world.outcome(world.score(0, 0, reward=float("nan")))
    world.settle()
    assert world.drops() == [(0, "verify_failed")]


def test_a_sample_issued_again_asks_for_a_version_that_can_still_be_trained_on() -> None:
    world = started(max_staleness=1, groups_per_batch=1, steps=50)
    world.scored(0)
    world.settle()
    world.version()
    world.settle()
    world.scored(2)
    world.settle()
    world.version()
    world.settle()
    world.failed(1, 0, "stale")
    again = only(world.settle(), ReissueRecord)[0]
    assert (again.task.not_before_depth, again.reason) == (1, "stale")
