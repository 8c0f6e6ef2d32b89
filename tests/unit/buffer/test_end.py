"""How a run ends, and how it goes on after its end."""

from __future__ import annotations

import dataclasses

from towline.buffer.view import Sources
from towline.contract.control import DropRecord, EndRecord
from towline.contract.task import EVAL
from unit.buffer.world import World, kinds, only, rules, source, started


def run_to(world: World, depth: int) -> None:
    while world.view.depth < depth:
        world.scored(*[number for number, group in world.state.groups.items() if group.batch is None and group.is_eval])
        world.scored(world.open_groups()[0])
        world.settle()
        world.version()
        world.settle()


def test_the_run_ends_at_its_steps_with_nothing_open() -> None:
    world = started(steps=3, groups_per_batch=1, max_staleness=0)
    run_to(world, 3)
    end = world.records()[-1]
    assert isinstance(end, EndRecord)
    assert (end.reason, end.depth) == ("steps", 3)
    assert world.view.finished
    assert world.open_groups() == []
    assert world.settle() == []


def test_what_is_open_at_the_end_is_dropped_by_name() -> None:
    world = started(steps=3, groups_per_batch=1, max_staleness=3, keep_off_line=True)
    run_to(world, 1)
    world.rules = dataclasses.replace(world.rules, steps=1)
    records = world.settle()
    assert {record.reason for record in only(records, DropRecord)} == {"end_of_run"}
    assert kinds(records)[-1] == "end"
    assert world.open_groups() == []


def test_the_end_waits_for_the_last_evaluation() -> None:
    world = started(steps=2, groups_per_batch=1, eval_every=5, eval_prompts=1)
    run_to(world, 2)
    assert world.state.ended is None
    assert not world.view.finished
    last = world.lineage.latest
    world.scored(*world.state.open_eval[last])
    assert kinds(world.settle()) == ["eval", "end"]


def test_a_restarted_buffer_on_an_ended_run_is_finished_at_once() -> None:
    world = started(steps=2, groups_per_batch=1)
    run_to(world, 2)
    before = list(world.control)
    world.restart()
    assert world.view.finished
    assert world.settle() == []
    assert world.control == before


def test_a_run_whose_steps_were_raised_goes_on_and_ends_again() -> None:
    world = started(steps=2, groups_per_batch=1)
    run_to(world, 2)
    world.restart()
    world.rules = dataclasses.replace(world.rules, steps=4)
    assert not world.view.finished
    assert "task" in kinds(world.settle())
    assert world.state.ended is None
    run_to(world, 4)
    ends = only(world.records(), EndRecord)
    assert [end.depth for end in ends] == [2, 4]
    assert world.view.finished
    world.restart()
    assert world.view.finished


def test_a_trainer_that_goes_back_below_the_end_takes_the_run_up_again() -> None:
    world = started(steps=2, groups_per_batch=1)
    run_to(world, 2)
    world.open(base=world.lineage.version_at_depth(1))
    assert kinds(world.settle()) == ["fork", "batch"]
    assert not world.view.finished
    world.version()
    world.settle()
    assert world.view.finished


def test_the_end_of_the_data_flushes_a_partial_batch_and_ends_the_run() -> None:
    world = World(rules(groups_per_batch=2, max_staleness=1, steps=50), Sources(source(length=5, epochs=1), source()))
    world.base()
    world.open()
    world.settle()
    while world.state.ended is None:
        world.scored(*world.open_groups())
        world.settle()
        if world.state.next_depth > world.view.depth:
            world.version()
            world.settle()
    assert [len(batch.rows) for batch in world.batches()] == [4, 4, 2]
    assert world.state.ended.reason == "end_of_data"
    assert world.state.ended.depth == 3
    assert world.view.finished
    world.sources = Sources(source(length=5, epochs=2), source())
    assert not world.view.finished
    assert "task" in kinds(world.settle())


def test_a_partial_batch_waits_for_the_groups_that_may_still_come() -> None:
    world = World(rules(groups_per_batch=2, max_staleness=1, steps=50), Sources(source(length=4, epochs=1), source()))
    world.base()
    world.open()
    world.settle()
    world.scored(0, 1)
    world.settle()
    assert world.open_groups() == [2, 3]
    world.scored(2)
    assert world.settle() == []
    world.failed(3, 0, "malformed", final=True)
    assert kinds(world.settle()) == ["cancel", "drop", "batch"]
    assert [row.group for row in world.batches()[-1].rows] == [2, 2]


def test_a_run_without_a_trainer_does_not_end() -> None:
    world = World(rules(steps=1))
    world.base()
    world.settle()
    assert not world.view.finished
    assert all(task.lane != EVAL for task in world.tasks())
