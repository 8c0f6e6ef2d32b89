"""Tokens over the bound: masked or kept only where the settings say so, row by row in the batch record, and counted apart."""

from __future__ import annotations

import msgspec
import pytest

from towline.buffer.dump import decode_state, dump, encode_state, load
from towline.buffer.figures import figures
from towline.buffer.groups import Scored
from towline.config import Settings
from towline.contract.control import BatchRecord, DropRecord, OverStale, OverStaleRow
from towline.contract.task import VersionSpan
from unit.buffer.world import World, only, started


def spans(*pieces: tuple[int, int]) -> tuple[VersionSpan, ...]:
    """(version, tokens), after a prompt of two tokens."""
    found, at = [], 2
    for version, tokens in pieces:
        found.append(VersionSpan(at, at + tokens, version, "retract" if found else "start"))
        at += tokens
    return tuple(found)


def at_depth_2(mode: str, **changes: object) -> tuple[World, list[int]]:
    """Staleness 1, groups 2 and 3 open, the next batch is for depth 2: version 0's tokens are over the bound. The versions."""
    world = started(groups_per_batch=1, max_staleness=1, steps=20, over_stale=mode, **changes)
    versions = [0]
    for number in (0, 1):
        world.scored(number)
        world.settle()
        versions.append(world.version())
        world.settle()
    assert world.state.next_depth == 2
    return world, versions


def batch_of(world: World) -> BatchRecord:
    return only(world.settle(), BatchRecord)[0]


def test_masked_rows_name_exactly_their_tokens_over_the_bound() -> None:
    world, (v0, v1, v2) = at_depth_2("mask_stale_tokens")
    world.outcome(world.score(2, 0, spans=spans((v0, 3), (v1, 4), (v2, 5))))
    world.outcome(world.score(2, 1, spans=spans((v1, 2), (v2, 1))))
    record = batch_of(world)
    assert [(row.least_depth, row.policy_tokens) for row in record.rows] == [(0, 12), (1, 3)]
    assert record.over_stale == OverStale(mode="mask", max_staleness=1, rows=(OverStaleRow(0, 3),))
    shown = figures(world.state, world.lineage, 20)
    assert shown["over_stale"] == {"samples": 1, "tokens": 3, "max": 2}
    assert shown["staleness"]["max"] == 1, "the figure of what is within the bound stays within it"
    assert shown["tokens_trained_mean"] == pytest.approx((4 * 2 + 15) / 6), "no length is lost from the length bias"
    assert dump(world.rebuilt()) == dump(world.state)


def test_a_sample_that_is_masked_whole_stays_with_its_group_as_long_as_another_one_trains() -> None:
    world, (v0, _, v2) = at_depth_2("mask_stale_tokens")
    world.outcome(world.score(2, 0, v0))
    world.outcome(world.score(2, 1, v2))
    assert batch_of(world).over_stale == OverStale(mode="mask", max_staleness=1, rows=(OverStaleRow(0, 2),))


def test_a_group_with_nothing_left_unmasked_is_dropped_by_that_name() -> None:
    world, (v0, _, _) = at_depth_2("mask_stale_tokens")
    world.scored(2, version=v0)
    assert [(r.group, r.reason) for r in only(world.settle(), DropRecord)] == [(2, "all_masked")]


def test_an_incomplete_group_waits_for_a_sample_that_trains() -> None:
    world, (v0, _, v2) = at_depth_2("mask_stale_tokens")
    world.outcome(world.score(2, 0, v0))
    assert world.settle() == []
    world.outcome(world.score(2, 1, v2))
    assert {row.group for row in batch_of(world).rows} == {2}


def test_kept_rows_are_trained_whole_and_named() -> None:
    world, (v0, _, _) = at_depth_2("keep")
    world.scored(2, version=v0)
    record = batch_of(world)
    assert record.over_stale == OverStale(mode="keep", max_staleness=1, rows=(OverStaleRow(0, 2), OverStaleRow(1, 2)))
    assert figures(world.state, world.lineage, 20)["over_stale"] == {"samples": 2, "tokens": 4, "max": 2}


@pytest.mark.parametrize("mode", ["mask_stale_tokens", "keep"])
def test_what_is_within_the_bound_leaves_no_word_in_the_record(mode: str) -> None:
    world, (_, v1, _) = at_depth_2(mode)
    world.scored(2, version=v1)
    assert batch_of(world).over_stale is msgspec.UNSET


@pytest.mark.parametrize("mode", ["mask_stale_tokens", "keep"])
def test_off_the_line_and_unknown_versions_are_still_drops(mode: str) -> None:
    world, (_, v1, v2) = at_depth_2(mode)
    world.scored(2, version=v2)
    world.settle()
    world.open(base=v1)
    world.settle()
    world.scored(3, version=v2)
    world.settle()
    assert (2, "off_line") in world.drops()
    assert (3, "off_line") in world.drops()


@pytest.mark.parametrize("mode", ["mask_stale_tokens", "keep"])
def test_a_fork_in_the_middle_judges_the_voided_batchs_rows_anew(mode: str) -> None:
    """Batch 2 masks or keeps v0's tokens; forked to depth 1 the same rows are within the bound there."""
    world, (v0, v1, _) = at_depth_2(mode, keep_off_line=True)
    world.outcome(world.score(2, 0, spans=spans((v0, 1), (v1, 3))))
    world.outcome(world.score(2, 1, v1))
    first = batch_of(world)
    assert isinstance(first.over_stale, OverStale)
    world.restart()
    world.open(base=v1)
    again = [record for record in only(world.settle(), BatchRecord) if record.rows[0].group in (1, 2)]
    assert [record.for_depth for record in again][:2] == [1, 2]
    found = {record.rows[0].group: record for record in again}
    assert (found[2].for_depth, found[1].for_depth) == (1, 2), "the stalest first"
    assert [record.over_stale for record in found.values()] == [msgspec.UNSET] * 2
    assert dump(world.rebuilt()) == dump(world.state)


def test_a_snapshot_that_didnt_count_tokens_by_version_drops_what_cant_be_told() -> None:
    for mode in ("mask_stale_tokens", "keep"):
        world, (v0, v1, _) = at_depth_2(mode)
        world.outcome(world.score(2, 0, spans=spans((v0, 3), (v1, 4))))
        world.outcome(world.score(2, 1, v1))
        facts = dump(world.state)
        for group in facts.groups:
            for sample in group.samples:
                if sample is not None and sample.scored is not None:
                    old = msgspec.structs.astuple(sample.scored)[:-1]
                    sample.scored = msgspec.convert(old, Scored)
        world.state = decode_state(encode_state(load(facts)))
        assert [(r.group, r.reason) for r in only(world.settle(), DropRecord)] == [(2, "stale")]


def test_keep_needs_a_correction() -> None:
    tree = {
        "run": {"name": "r"}, "model": {"source": "m"}, "prompts": {"source": "a:b"}, "sampling": {"max_tokens": 1},
        "reward": {"function": "a:b"}, "buffer": {"over_stale": "keep"},
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"set trainer\.correction"):
        Settings.model_validate(tree)
    assert Settings.model_validate(tree | {"trainer": {"correction": "tis"}}).buffer.over_stale == "keep"
