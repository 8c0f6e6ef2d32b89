"""Speed and size of the pure core, the appended form of its decisions, its rules, its figures and its named states."""

from __future__ import annotations

import itertools
import time
import tracemalloc

import pytest

from towline.buffer.decide import decide
from towline.buffer.dump import decode_state, dump, encode_state
from towline.buffer.figures import figures, staleness, waiting_for
from towline.buffer.fleet import Fleet
from towline.buffer.groups import Batch
from towline.buffer.records import chunks, subject_of
from towline.buffer.rules import rules_from
from towline.buffer.state import State
from towline.buffer.view import Unit
from towline.bus.topology import Topology
from towline.config import Settings
from towline.contract import control
from towline.contract.codec import encode
from towline.contract.outcome import decode_outcome
from towline.contract.policy import ReplicaInfo
from towline.contract.task import VersionSpan
from towline.errors import UsageError
from unit.buffer.world import World, rules, started

SAMPLES_PER_SECOND = 5_000


def test_outcome_to_batch_is_fast_enough_on_one_core() -> None:
    world = started(max_staleness=1, steps=40, groups_per_batch=64, group_size=8, max_open_groups=100_000)
    spent, samples = 0.0, 0
    while world.state.ended is None:
        world.outcomes += [encode(world.score(number, index)) for number in world.open_groups() for index in range(8)]
        begun = time.process_time()
        samples += len(world.outcomes) - world.applied_outcomes
        world.read_outcomes()
        world.settle()
        spent += time.process_time() - begun
        while world.state.next_depth > world.view.depth:
            world.version()
        begun = time.process_time()
        world.settle()
        spent += time.process_time() - begun
    assert samples == 40 * 64 * 8
    assert samples / spent > SAMPLES_PER_SECOND, f"{samples / spent:.0f} samples/s"


def test_memory_does_not_grow_with_the_payload() -> None:
    """A sample of many tokens and turns costs what a short one does."""

    def held(tokens: int) -> int:
        world = started(steps=4, groups_per_batch=64)
        groups = world.open_groups()
        spans = tuple(VersionSpan(2 * i, 2 * i + 1, 0, "start" if i == 0 else "retract") for i in range(tokens))
        outcomes = [encode(world.score(number, index, spans=spans)) for number in groups for index in range(2)]
        tracemalloc.start()
        for sequence, data in enumerate(outcomes, start=1):
            world.state.apply_outcome(decode_outcome(data), sequence)
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return size

    assert held(2000) < held(1) + (16 << 10)  # 128 samples; their spans alone would be megabytes


def test_a_snapshot_holds_every_fact() -> None:
    world = started(max_staleness=1, eval_every=1)
    world.scored(*world.open_groups()[:1])
    world.failed(world.open_groups()[1], 0)
    world.settle()
    again = decode_state(encode_state(world.state))
    assert dump(again) == dump(world.state)
    world.state = again
    world.scored(*world.open_groups())
    assert any(isinstance(record, control.BatchRecord) for record in world.settle())


def test_appends_never_split_a_group_and_stay_within_the_limits() -> None:
    world = World(rules(group_size=300, groups_per_batch=7, max_open_groups=7))
    world.base()
    stamps = itertools.count(1)
    units = decide(world.view)
    found = list(chunks(units, Topology("world"), lambda: f"w/{next(stamps)}"))
    assert [len(chunk.messages) for chunk in found] == [900, 900, 300]
    for chunk in found:
        groups = [record.task.group for record in chunk.records if isinstance(record, control.TaskRecord)]
        assert all(groups.count(group) == 300 for group in groups)
    assert [record.writer for chunk in found for record in chunk.records] == [f"w/{n}" for n in range(1, 2101)]


def test_every_record_has_its_subject() -> None:
    topology = Topology("r")
    world = started(eval_every=1)
    tasks: list[Unit] = [(record,) for record in world.records() if isinstance(record, control.TaskRecord)]
    subjects = {subject_of(record, topology) for unit in tasks for record in unit}
    assert subjects == {"towline.r.control.task.train", "towline.r.control.task.eval.0"}
    again = control.ReissueRecord(writer="", task=world.tasks()[0], reason="x")
    assert subject_of(again, topology) == "towline.r.control.reissue.eval.0"
    assert subject_of(control.DropRecord(writer="", lane="train", group=1, samples=1, reason="x"), topology) == (
        "towline.r.control.drop"
    )


def settings(**buffer: object) -> Settings:
    return Settings.model_validate(
        {
            "run": {"name": "r"}, "model": {"source": "m"}, "prompts": {"source": "a:b"}, "reward": {"function": "a:b"},
            "sampling": {"max_tokens": 8, "top_p": 0.5}, "buffer": buffer, "eval": {"temperature": 0.25},
        }
    )  # fmt: skip


def test_rules_come_from_the_settings_and_the_model() -> None:
    found = rules_from(settings(off_line="keep", max_staleness=1), stop_token_ids=(4,))
    assert found.sampling.stop_token_ids == found.eval_sampling.stop_token_ids == (4,)
    assert (found.sampling.temperature, found.eval_sampling.temperature, found.eval_sampling.top_p) == (1.0, 0.25, 0.5)
    assert found.keep_off_line
    assert not rules_from(settings(off_line="keep"), stop_token_ids=()).keep_off_line
    with pytest.raises(UsageError, match="no batch could ever be complete"):
        rules_from(settings(max_open_groups=3, groups_per_batch=4), stop_token_ids=())


def test_staleness_figures_are_of_the_samples() -> None:
    state = State()
    assert staleness(state.counted().staleness) == {"mean": 0.0, "p99": 0, "max": 0}
    state.batches = {0: Batch(1, 0, 1, (0,), 990, {0: 990}), 1: Batch(1, 1, 2, (1,), 10, {2: 10})}
    assert staleness(state.counted().staleness) == {"mean": 0.02, "p99": 0, "max": 2}
    state.batches[2] = Batch(1, 2, 3, (2,), 1, {1: 1})
    assert staleness(state.counted().staleness)["p99"] == 1


def test_figures_add_up_at_every_moment() -> None:
    world = started(steps=3, max_staleness=1, groups_per_batch=1, eval_every=1, eval_prompts=1)
    while world.state.ended is None:
        for version in list(world.state.open_eval):
            world.scored(*world.state.open_eval[version], reward=world.lineage.depth(version) / 4)
        if world.open_groups():
            world.scored(world.open_groups()[0])
        world.settle()
        shown = figures(world.state, world.lineage, 3)
        assert shown["admitted"] == shown["trained"] + shown["evaluated"] + shown["open"] + sum(shown["dropped"].values())
        if world.state.next_depth > world.view.depth:
            world.version()
            world.settle()
    shown = figures(world.state, world.lineage, 3)
    assert (shown["trained"], shown["evaluated"], shown["open"]) == (6, 4, 0)
    assert (shown["reward_first"], shown["reward_last"]) == (0.0, 0.75)
    assert [depth for _, depth, _ in shown["evals"]] == [0, 1, 2, 3]


def fleet_of(*replicas: tuple[str, int | None]) -> Fleet:
    fleet = Fleet.__new__(Fleet)
    fleet.replicas = [
        ReplicaInfo(replica=str(i), host="h", engine="e", slots=1, busy=0, state=state, version=version, at=0.0)  # type: ignore[arg-type]
        for i, (state, version) in enumerate(replicas)
    ]
    return fleet


def test_whatever_could_hang_has_a_name() -> None:
    world = World(rules(steps=2, groups_per_batch=1))
    world.base()
    world.settle()
    serving = fleet_of(("serving", 0))

    def name(fleet: Fleet, waits: float = 0.0) -> str:
        return waiting_for(world.view, fleet, batch_waits_seconds=waits).partition(":")[0]

    assert name(serving) == "no_trainer"
    world.open()
    world.settle()
    assert name(serving) == ""
    assert name(fleet_of()) == "no_eligible_replica"
    assert name(fleet_of(("draining", 0))) == "no_eligible_replica"
    assert name(fleet_of(("preparing", None))) == ""
    world.scored(*world.open_groups())
    world.settle()
    assert name(serving, 299.0) == ""
    assert name(serving, 301.0) == "commit_failed"
    v1 = world.version()
    world.settle()
    assert name(fleet_of(("serving", 0))) == "no_eligible_replica"  # depth 1 is asked for in sync mode
    assert name(fleet_of(("serving", v1))) == ""
    world.scored(*world.open_groups())
    world.settle()
    world.version()
    world.settle()
    assert name(fleet_of()) == "finished"
