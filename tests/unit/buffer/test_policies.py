"""Which groups are batched, what becomes of stale ones, filtering, and the ends that have a name."""

from __future__ import annotations

import dataclasses

import pytest

from towline.buffer.dump import dump
from towline.buffer.figures import figures
from towline.buffer.policies.base import NAMES, Candidate, load_policy
from towline.buffer.view import Sources
from towline.contract.control import BatchRecord, DropRecord, EndRecord, TaskRecord
from towline.contract.task import VersionSpan
from towline.environment.prompts import Prompt
from towline.errors import UsageError
from unit.buffer.world import World, kinds, only, rules, source, started


class Prioritised:
    """Prompt i has priority i."""

    def __len__(self) -> int:
        return 50

    def get(self, epoch: int, position: int) -> Prompt:
        found = source(length=50).get(epoch, position)
        return Prompt(found.tokens, found.ref, {"priority": position})


def shortest(candidate: Candidate) -> int:
    """A policy of one's own, named by import path."""
    return candidate.policy_tokens


def chosen(policy: str) -> list[int]:
    """The first batch's groups, of six: 3 and 5 by the base model, the others by version 1 (depth 1)."""
    world = started(groups_per_batch=2, max_staleness=2, steps=20, policy=load_policy("fifo"))
    world.sources = Sources(Prioritised(), source("held-out", 3))
    world.state = type(world.state)()
    world.control.clear()
    world.settle()
    world.scored(0, 1)
    world.settle()
    world.version()
    world.rules = dataclasses.replace(world.rules, policy=load_policy(policy), groups_per_batch=6)
    world.settle()
    for number in (2, 3, 4, 5, 6):
        world.scored(number, version=0 if number in (3, 5) else world.lineage.latest)
    world.rules = dataclasses.replace(world.rules, groups_per_batch=2)
    record = only(world.step(), BatchRecord)[0]
    return sorted({row.group for row in record.rows})


def test_each_policy_takes_its_own() -> None:
    assert chosen("stalest_first") == [3, 5]
    assert chosen("fifo") == [2, 3]
    assert chosen("freshest_first") == [2, 4]
    assert chosen("priority") == [5, 6]
    assert chosen("unit.buffer.test_policies:shortest") == [2, 3]


def test_a_policy_that_isnt_there_is_refused_by_name() -> None:
    assert all(callable(load_policy(name)) for name in NAMES)
    for wrong in ("youngest", "nowhere:policy", "towline.buffer.policies.base:NAMES"):
        with pytest.raises(UsageError, match=r"buffer\.policy"):
            load_policy(wrong)


def stale_world(**changes: object) -> World:
    """Group 2 has a score by the base model only, and depth 0 becomes too stale."""
    world = started(groups_per_batch=2, max_staleness=1, steps=20, **changes)
    world.outcome(world.score(2, 0, 0))
    world.scored(0, 1)
    world.settle()
    world.version()
    world.settle()
    return world


def test_a_stale_group_is_dropped_or_its_prompt_admitted_again() -> None:
    for requeue in (False, True):
        world = stale_world(over_stale="requeue" if requeue else "drop")
        world.scored(*[number for number in world.open_groups() if number != 2][:2])
        records = world.settle()
        assert [(r.group, r.reason) for r in only(records, DropRecord)] == [(2, "stale")]
        prompt = next(task.prompt for task in world.tasks() if task.group == 2)
        after = only(records, TaskRecord)
        again = [record.task for record in after if record.requeues == 2]
        assert [(task.sample, task.prompt) for task in again] == ([(0, prompt), (1, prompt)] if requeue else [])
        assert world.state.requeue == {}
        assert world.state.resampled == int(requeue)
        cursors = [task.cursor for task in world.tasks()]
        assert cursors == sorted(cursors, key=lambda c: (c.epoch, c.position)), "no prompt is skipped or drawn twice"
        assert dump(world.rebuilt()) == dump(world.state)


def test_a_batch_waits_for_the_last_chance_of_a_young_group() -> None:
    world = stale_world(tail_wait_seconds=30.0)
    world.now = 1010.0
    others = [number for number in world.open_groups() if number != 2]
    world.scored(*others[:2])
    assert "batch" not in kinds(world.settle())
    world.now += 25.0
    assert "batch" in kinds(world.settle())
    patient = stale_world(tail_wait_seconds=30.0)
    patient.now = 1010.0
    patient.scored(*[number for number in patient.open_groups() if number != 2][:2])
    patient.settle()
    patient.outcome(patient.score(2, 1))
    batch = only(patient.settle(), BatchRecord)[0]
    assert 2 in {row.group for row in batch.rows}


def test_groups_without_an_advantage_are_filtered_and_counted() -> None:
    world = started(groups_per_batch=2, filter_equal_rewards=True, steps=5)
    world.scored(0, reward=1.0)
    world.outcome(world.score(1, 0, reward=0.0))
    world.outcome(world.score(1, 1, reward=1.0))
    records = world.settle()
    assert [(r.group, r.reason) for r in only(records, DropRecord)] == [(0, "equal_rewards")]
    assert world.open_groups() == [1, 2], "it gives its admission back"
    assert figures(world.state, world.lineage, 5)["dropped"] == {"equal_rewards": 2}
    assert world.state.resampled == 1


def filtered(world: World, groups: int) -> None:
    while groups:
        number = next(number for number in world.open_groups() if number not in world.state.complete)
        world.scored(number, reward=1.0)
        world.settle()
        groups -= 1


def test_max_resample_rounds_ends_a_run_whose_prompts_give_no_signal() -> None:
    world = started(groups_per_batch=2, filter_equal_rewards=True, max_resample_rounds=3, steps=5)
    filtered(world, 5)
    assert world.state.ended is None
    filtered(world, 1)
    end = world.records()[-1]
    assert isinstance(end, EndRecord)
    assert end.reason == "max_resample_rounds"
    assert world.view.finished
    assert world.open_groups() == []
    world.restart()
    assert world.settle() == []
    world.rules = dataclasses.replace(world.rules, max_resample_rounds=4)
    assert "task" in kinds(world.settle()), "a higher limit takes the run up again"


def test_max_resample_rounds_flushes_what_is_there() -> None:
    world = started(groups_per_batch=2, filter_equal_rewards=True, max_resample_rounds=2, min_batch_groups=1, steps=5)
    world.outcome(world.score(0, 0, reward=0.0))
    world.outcome(world.score(0, 1, reward=1.0))
    filtered(world, 4)
    batch = only(world.records(), BatchRecord)[0]
    assert {row.group for row in batch.rows} == {0}
    assert world.state.ended is None
    assert world.state.resampled == 0


def test_what_is_left_at_the_datas_end_is_flushed_or_dropped_as_too_few() -> None:
    for least, fate in ((1, "batch"), (2, "min_batch_groups")):
        world = World(rules(groups_per_batch=3, min_batch_groups=least, steps=9))
        world.sources = Sources(source(length=4, epochs=1), source("held-out", 3))
        world.base()
        world.open()
        world.settle()
        world.scored(*world.open_groups())
        world.settle()
        world.version()
        world.settle()
        world.scored(*world.open_groups())
        records = world.settle()
        if fate == "batch":
            assert len({row.group for row in only(records, BatchRecord)[0].rows}) == 1
            world.version()
            records = world.settle()
        else:
            assert [r.reason for r in only(records, DropRecord)] == [fate]
        assert world.records()[-1].reason == "end_of_data"  # type: ignore[union-attr]
        assert world.view.finished


def test_oversampling_admits_more_than_a_batch_takes_and_counts_the_surplus() -> None:
    world = started(groups_per_batch=2, oversample=1.5, steps=5)
    assert len(world.open_groups()) == 3
    world.scored(0, 1)
    world.settle()
    world.outcome(world.score(2, 0))
    world.version()
    world.settle()
    assert world.state.dropped == {"stale": 2}
    assert len(world.open_groups()) == 3


def test_the_length_bias_of_what_is_trained_is_shown() -> None:
    """Long samples come late: the freshest-first batch leaves them out."""
    world = started(groups_per_batch=2, max_staleness=2, steps=20, policy=load_policy("freshest_first"))
    for number, (tokens, version) in enumerate([(10, 0), (10, 0), (2, 0), (2, 0)]):
        for index in range(2):
            spans = (VersionSpan(2, 4, version, "start"),)
            score = world.score(number, index, spans=spans)
            fields = {name: getattr(score, name) for name in score.__struct_fields__}
            world.outcome(type(score)(**(fields | {"policy_tokens": tokens})))
    world.rules = dataclasses.replace(world.rules, policy=shortest)
    world.step()
    shown = figures(world.state, world.lineage, 20)
    assert (shown["tokens_trained_mean"], shown["tokens_scored_mean"]) == (2.0, 6.0)
    assert shown["length_bias"] == pytest.approx(1 / 3)
    assert dump(world.rebuilt()) == dump(world.state)
