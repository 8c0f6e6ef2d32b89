"""What is read of CONTROL for one sample is what all of CONTROL says of it, and is little of it."""

from __future__ import annotations

from typing import Any

from support.planted_control import FIELDS, Draw, KeptControl, Said, fold, task_of
from towline.bus.topology import Topology
from towline.contract.control import BatchRecord, BatchRow, TaskRecord
from towline.trace.decided import read_decided
from towline.trace.life import Life

TOPOLOGY = Topology("small")


async def decided(source: Any, group: int, sample: int, begins: int, task_sequence: int) -> Life:
    life = Life(run="small", group=group, sample=sample, control_begins=begins)
    await read_decided(source, life, None, task_sequence)
    return life


def said(life: Life) -> Said:
    return Said(
        attempts=[[one.task_sequence, one.reissued, one.cancelled] for one in life.attempts],
        batches=[[one.sequence, one.void_by] for one in life.batches],
        over=[one.over_stale_tokens for one in life.batches],
        dropped=life.dropped, requeued=life.requeued, again_in=life.prompt_again_in, prompt_of=life.prompt_of,
        evaluated=life.evaluated_version, size=life.group_size,
    )  # fmt: skip


def kinds(expected: Said) -> set[str]:
    """What makes the sample a case of its own."""
    void = [batch for batch in expected.batches if batch[1] is not None]
    found = {
        "batched again after a fork": len(expected.batches) > len(void) > 0,
        "void": bool(void) and len(expected.batches) == len(void),
        "dropped after a fork": bool(void) and expected.dropped is not None,
        "requeued": expected.again_in is not None,
        "of a requeued one": expected.prompt_of is not None,
        "evaluated": expected.evaluated is not None,
        "over the bound": any(expected.over),
        "issued again": len(expected.attempts) > 1,
        "cancelled": any(why for _, _, why in expected.attempts),
        "only its successor is left": expected.again_in is not None and expected.dropped is None,
        "only its end is left": not expected.attempts and expected.dropped is not None,
    }
    return {kind for kind, holds in found.items() if holds}


async def test_a_sample_is_told_as_the_whole_of_control_tells_it():
    met = set()
    for seed in range(16):
        draw = Draw(TOPOLOGY, seed)
        first = 1 if seed % 2 else 5 * seed + 5  # every other one has lost its beginning
        kept = [(place, record) for place, (_, record) in enumerate(draw.records, 1) if place >= first]
        source = KeptControl(TOPOLOGY, draw.records, first)
        for group, sample in [(group, sample) for group, size in draw.sizes.items() for sample in range(size)]:
            expected = fold(kept, group, sample)
            met |= kinds(expected)
            every = fold(enumerate((record for _, record in draw.records), 1), group, sample)
            # The trajectory names one of the sample's tasks; or there is none, or one that names another's.
            for task_sequence in {0, len(draw.records), *(place for place, _, _ in every.attempts)}:
                assert said(await decided(source, group, sample, first, task_sequence)) == expected, (seed, group, sample)
    assert len(met) == 11, met


async def test_a_sample_without_a_trajectory_costs_some_dozens_of_messages():
    records = [
        (TOPOLOGY.task("train"), TaskRecord(**FIELDS, task=task_of("small", group, sample, 4)))
        for group in range(2500)
        for sample in range(4)
    ]
    source = KeptControl(TOPOLOGY, records)
    for group in (0, 1, 1249, 1777, 2499):
        source.fetched = 0
        life = await decided(source, group, 3, 1, 0)
        assert [one.task_sequence for one in life.attempts] == [4 * group + 4]
        assert source.fetched < 100


async def test_the_order_of_a_replay_is_followed_too():
    order = [5, 2, 9, 0, 7, 1]
    records = [(TOPOLOGY.task("train"), TaskRecord(**FIELDS, task=task_of("small", group, 0, 1))) for group in order]
    source = KeptControl(TOPOLOGY, records)
    for place, group in enumerate(order, 1):
        assert [one.task_sequence for one in (await decided(source, group, 0, 1, 0)).attempts] == [place]


async def test_later_batches_are_not_read_while_one_stands():
    rows = tuple(BatchRow(0, sample, sample + 1, bytes(16), 0.5, 0, 4) for sample in range(4))
    batches = [BatchRecord(**FIELDS, epoch=1, for_depth=0, rows=rows, at=1.0)]
    batches += [BatchRecord(**FIELDS, epoch=1, for_depth=depth, rows=(), at=1.0) for depth in range(1, 500)]
    tasks = [TaskRecord(**FIELDS, task=task_of("small", 0, sample, 4)) for sample in range(4)]
    records = [
        *((TOPOLOGY.task("train"), task) for task in tasks),
        *((TOPOLOGY.control("batch"), batch) for batch in batches),
    ]
    source = KeptControl(TOPOLOGY, records)
    life = await decided(source, 0, 2, 1, 3)
    assert [one.for_depth for one in life.batches] == [0]
    assert source.fetched == 2
