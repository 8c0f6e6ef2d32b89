"""Pacing, prompts and tasks: what is admitted, when, and with which numbers."""

from __future__ import annotations

import pytest

from towline.buffer.admission import allowance
from towline.buffer.decide import decide
from towline.buffer.view import Sources
from towline.contract.control import TaskRecord
from towline.contract.task import Cursor, PromptRef
from towline.errors import UsageError
from unit.buffer.world import World, kinds, rules, source, started


def test_nothing_is_admitted_before_the_log_has_entry_0() -> None:
    world = World(rules())
    assert world.settle() == []
    world.base()
    assert kinds(world.settle()) == ["task"] * 4


def test_sync_mode_admits_one_batch_and_the_next_only_once_the_depth_has_grown() -> None:
    world = started(max_staleness=0, groups_per_batch=3)
    assert world.open_groups() == [0, 1, 2]
    world.scored(0, 1, 2)
    assert kinds(world.settle()) == ["batch"]
    assert world.open_groups() == []
    world.version()
    world.settle()
    assert world.open_groups() == [3, 4, 5]
    assert {task.not_before_depth for task in world.tasks() if task.group >= 3} == {1}


def test_the_worked_example_of_the_pacing_rule() -> None:
    world = started(groups_per_batch=4, max_staleness=1, steps=100)
    assert world.open_groups() == list(range(8))
    world.scored(0, 1, 2, 3)
    world.settle()
    assert (world.state.next_depth, world.open_groups()) == (1, [4, 5, 6, 7])
    world.failed(4, 0, final=True)
    world.failed(5, 1, final=True)
    world.settle()
    assert world.open_groups() == [6, 7, 8, 9]
    world.version()
    world.settle()
    assert world.open_groups() == [6, 7, 8, 9, 10, 11, 12, 13]
    world.open(base=0)
    world.settle()
    assert len(world.open_groups()) == 8  # the voided batch's groups were complete, and are batched for depth 0 at once
    assert allowance(world.view) == 0
    assert world.state.waiting_groups(0) == 12
    world.version()
    world.settle()
    assert world.state.waiting_groups(1) == 8


def test_the_last_batches_admit_no_more_than_the_run_still_needs() -> None:
    world = started(groups_per_batch=2, max_staleness=3, steps=2)
    assert world.open_groups() == [0, 1, 2, 3]
    world.scored(0, 1)
    world.settle()
    world.version()
    world.settle()
    assert world.open_groups() == [2, 3]


def test_the_cap_on_open_groups_holds_whatever_the_staleness_allows() -> None:
    world = started(groups_per_batch=2, max_staleness=9, max_open_groups=5)
    assert world.open_groups() == [0, 1, 2, 3, 4]
    world.scored(0, 1)
    world.settle()
    assert world.open_groups() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_admitted_minus_dropped_never_exceeds_the_rule_of_the_design(staleness: int) -> None:
    world = started(groups_per_batch=2, max_staleness=staleness, steps=8)
    while world.state.ended is None:
        admitted = len({task.group for task in world.tasks()}) - len(world.drops())
        assert admitted <= (world.view.depth + 1 + staleness) * 2
        world.scored(*world.open_groups()[:3])
        world.settle()
        if world.state.next_depth > world.view.depth:
            world.version()
            world.settle()
    assert len(world.batches()) == 8


def test_a_task_waits_for_no_fresher_version_than_its_place_in_the_queue_needs() -> None:
    world = started(groups_per_batch=2, max_staleness=2)
    assert {task.group: task.not_before_depth for task in world.tasks()} == dict.fromkeys(range(6), 0)
    world.scored(0, 1)
    world.settle()
    world.version()
    world.settle()
    # 4 wait at depth 1: the new ones are places 4 and 5, trained at depth 1 + 4 // 2 = 3 at the earliest
    assert {task.group: task.not_before_depth for task in world.tasks() if task.group > 5} == {6: 1, 7: 1}


def test_a_group_that_is_next_may_be_served_by_a_version_at_the_bound() -> None:
    world = started(groups_per_batch=2, max_staleness=2, max_open_groups=2)
    for _ in range(3):
        world.scored(*world.open_groups())
        world.settle()
        while world.state.next_depth > world.view.depth:
            world.version()
        world.settle()
    # The open ones were admitted at depth 2 behind a batch of two groups: place 2 is trained at depth 2 + 2 // 2 = 3.
    newest = [task for task in world.tasks() if task.group in world.open_groups()]
    assert world.view.depth == 3
    assert {task.not_before_depth for task in newest} == {1}


def test_a_group_is_one_unit_of_all_its_samples() -> None:
    world = World(rules(group_size=3))
    world.base()
    units = decide(world.view)
    assert len(units) == 2
    for number, unit in enumerate(units):
        tasks = [record.task for record in unit if isinstance(record, TaskRecord)]
        assert [(task.group, task.sample, task.group_size) for task in tasks] == [(number, i, 3) for i in range(3)]
        assert len({task.seed for task in tasks}) == 3
        assert len({task.prompt_tokens.tobytes() for task in tasks}) == 1


def test_restarts_neither_skip_nor_repeat_a_prompt() -> None:
    straight, restarted = started(max_staleness=3, groups_per_batch=1), started(max_staleness=3, groups_per_batch=1)
    for world in (straight, restarted):
        while world.state.ended is None:
            world.scored(*world.open_groups()[:1])
            if world is restarted:
                world.restart()
            world.step()
            if world.state.next_depth > world.view.depth:
                world.version()
            if world is restarted:
                world.restart()
            world.settle()
    refs = [task.prompt_ref for task in restarted.tasks() if task.sample == 0]
    assert refs == [task.prompt_ref for task in straight.tasks() if task.sample == 0]
    assert [ref.epoch for ref in refs] == [0] * 5 + [1] * 5
    assert sorted(ref.index for ref in refs[:5]) == list(range(5))
    assert restarted.tasks()[-1].cursor == Cursor(2, 0)


def test_a_source_that_fails_or_gives_nothing_is_named() -> None:
    class Broken:
        def __len__(self) -> int:
            return 3

        def get(self, epoch: int, position: int) -> None:
            raise KeyError("row 1")

    world = World(rules(), sources=Sources(Broken(), source()))  # type: ignore[arg-type]
    world.base()
    with pytest.raises(UsageError, match="prompt 0 of pass 0: KeyError: 'row 1'"):
        decide(world.view)


def test_prompt_references_name_source_pass_and_row() -> None:
    world = started()
    assert world.tasks()[0].prompt_ref == PromptRef("numbers", 0, world.tasks()[0].reference["answer"])
