"""Lane eval: which versions, once each, and how an evaluation is closed."""

from __future__ import annotations

from towline.contract.control import EvalRecord
from towline.contract.task import EVAL
from unit.buffer.world import World, kinds, only, started


def evaluating(**changes: object) -> World:
    values: dict[str, object] = dict(eval_every=2, eval_prompts=2, groups_per_batch=1, max_staleness=1, steps=5)
    return started(**(values | changes))


def eval_groups(world: World, version: int) -> list[int]:
    return sorted(world.state.open_eval.get(version, {}))


def step(world: World) -> int:
    world.scored(world.open_groups()[0])
    world.settle()
    version = world.version()
    world.settle()
    return version


def test_entry_0_each_multiple_and_the_last_depth_are_evaluated() -> None:
    world = evaluating()
    while world.state.ended is None:
        for version in list(world.state.open_eval):
            world.scored(*eval_groups(world, version))
        world.settle()
        if world.open_groups():
            step(world)
    records = only(world.records(), EvalRecord)
    assert [record.depth for record in records] == [0, 2, 4, 5]
    assert all((record.wanted, len(record.rows), record.mean) == (2, 2, 1.0) for record in records)


def test_eval_tasks_name_their_version_and_repeat_prompts_and_seeds() -> None:
    world = evaluating()
    step(world)
    v2 = step(world)
    tasks = [task for task in world.tasks() if task.lane == EVAL]
    first, second = [[task for task in tasks if task.exact_version == version] for version in (0, v2)]
    assert len(first) == len(second) == 2
    assert [(task.prompt_ref, task.seed) for task in first] == [(task.prompt_ref, task.seed) for task in second]
    assert {task.not_before_depth for task in second} == {2}
    assert len({task.seed for task in first}) == 2


def test_after_a_crash_only_the_missing_groups_are_issued() -> None:
    world = World(evaluating().rules)
    world.base()
    first = world.step()
    assert kinds(first) == ["task", "task"]
    world.control.pop()
    world.restart()
    world.settle()
    tasks = [task for task in world.tasks() if task.lane == EVAL]
    assert [task.prompt_ref.index for task in tasks] == [record.task.prompt_ref.index for record in first]  # type: ignore[attr-defined]


def test_what_nobody_serves_by_its_deadline_is_gone_and_the_mean_is_over_the_rest() -> None:
    world = evaluating(eval_deadline_seconds=50.0)
    done, missing = eval_groups(world, 0)
    world.outcome(world.score(done, 0, 0, lane="eval", reward=0.25))
    world.now += 51
    world.settle()
    assert world.drops() == [(missing, "version_gone")]
    record = only(world.records(), EvalRecord)[0]
    assert (record.wanted, [row.group for row in record.rows], record.mean) == (2, [done], 0.25)
    assert world.state.evals == {0: (0, 0.25)}
    assert world.state.evaluated == 1


def test_an_evaluation_of_which_nothing_came_closes_without_a_mean() -> None:
    world = evaluating()
    world.now += 51
    world.settle()
    assert only(world.records(), EvalRecord)[0].mean is None


def test_a_version_that_moved_is_asked_for_again_until_the_deadline() -> None:
    world = evaluating()
    group = eval_groups(world, 0)[0]
    for _ in range(5):
        world.failed(group, 0, "version_moved", lane="eval")
        assert kinds(world.settle()) == ["cancel", "reissue"]
    assert world.drops() == []


def test_a_score_by_another_version_is_never_evaluated() -> None:
    world = evaluating()
    v1 = step(world)
    group = eval_groups(world, 0)[0]
    world.outcome(world.score(group, 0, v1, lane="eval"))
    world.settle()
    assert (group, "wrong_version") in world.drops()


def test_a_version_that_left_the_line_is_closed_with_what_there_is() -> None:
    world = evaluating()
    step(world)
    v2 = step(world)
    done, missing = eval_groups(world, v2)
    world.outcome(world.score(done, 0, v2, lane="eval"))
    world.open(base=0)
    world.settle()
    assert (missing, "version_gone") in world.drops()
    assert world.state.evals[v2] == (2, 1.0)


def test_settings_that_change_do_not_call_old_versions_back() -> None:
    world = evaluating(eval_every=4)
    for _ in range(4):
        world.scored(*eval_groups(world, 0))
        step(world)
    issued = {task.exact_version for task in world.tasks() if task.lane == EVAL}
    world.rules = evaluating(eval_every=1).rules
    world.settle()
    assert {task.exact_version for task in world.tasks() if task.lane == EVAL} == issued


def test_no_evaluations_where_they_are_turned_off() -> None:
    world = evaluating(eval_every=0)
    assert all(task.lane != EVAL for task in world.tasks())
