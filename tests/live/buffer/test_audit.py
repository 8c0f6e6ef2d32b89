"""A violation of each invariant, planted into real streams, is found and named; a clean run stays clean."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from live.buffer.harness import connected, settings_for
from live.buffer.planting import Planted
from towline.config import BusSettings, StoreSettings
from towline.contract.codec import digest

Plant = Callable[[Planted], Awaitable[None]]


@pytest.fixture
async def planted(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, request: pytest.FixtureRequest
) -> AsyncIterator[Planted]:
    staleness = getattr(request, "param", 0)
    settings = settings_for(run_name, bus_settings, file_store_settings, buffer={
        "group_size": 2, "groups_per_batch": 1, "max_staleness": staleness})  # fmt: skip
    async with connected(settings) as (bus, objects):
        yield Planted(bus, objects, settings)


async def test_a_run_as_it_should_be_is_clean_and_counted(planted: Planted) -> None:
    epoch = await planted.start()
    v1 = await planted.step(epoch, 0, 0, 0)
    await planted.admit(1, version=v1)
    await planted.sample(1, v1, 1)
    await planted.evaluate(v1, 1, 1)
    await planted.admit(2)
    await planted.drop(2)
    live = await planted.audit()
    assert live.clean, live.lines()
    assert not live.finished
    again = await planted.open(0, 0)  # from the base: the batch of depth 0 is void, its rows are batched anew
    await planted.batch(again, 0, 0)
    await planted.commit(again, 0, 1)
    await planted.end(1)
    report = await planted.audit()
    assert report.clean, report.lines()
    assert report.as_dict() | {"run": ""} == {
        "run": "", "clean": True, "finished": True, "depth": 1, "versions": 2, "batches": 1, "rows_checked": 4, "rows_purged": 0,
        "purged": {"CONTROL": 0, "OUTCOME": 0, "TRAJECTORY": 0}, "batches_purged": 0,
        "samples": {"admitted": 6, "trained": 2, "evaluated": 2, "dropped": {"deadline": 2}, "open": 0}, "turned_away": {},
        "staleness_max": 0, "over_stale": {"rows": 0, "tokens": 0, "max": 0}, "end_reason": "steps",
        "violations": [],
    }  # fmt: skip
    assert json.loads(report.as_json()) == report.as_dict()
    assert report.lines()[-1] == "clean"


async def _dropped_though_trained(run: Planted) -> None:
    epoch = await run.start()
    await run.step(epoch, 0, 0, 0)
    await run.drop(0, "stale")


async def _dropped_twice(run: Planted) -> None:
    await run.start()
    await run.admit(0)
    await run.drop(0)
    await run.drop(0, "stale")


async def _trained_though_dropped(run: Planted) -> None:
    epoch = await run.start()
    await run.admit(0)
    await run.sample(0, 0, 0)
    await run.drop(0)
    await run.batch(epoch, 0, 0)
    await run.commit(epoch, 0, 1)


async def _evaluated_and_dropped(run: Planted) -> None:
    await run.start()
    await run.admit(0, version=0)
    await run.sample(0, 0, 0)
    await run.drop(0, "version_gone")
    await run.evaluate(0, 0, 0)


async def _admitted_twice(run: Planted) -> None:
    await run.start()
    await run.admit(0)
    await run.admit(0, samples=1)


async def _never_admitted(run: Planted) -> None:
    epoch = await run.start()
    await run.admit(0)
    await run.sample(0, 0, 0)
    await run.batch(epoch, 0, 0, group=7)


async def _half_a_group(run: Planted) -> None:
    await run.start()
    await run.admit(0, samples=1)


async def _open_after_the_end(run: Planted) -> None:
    epoch = await run.start()
    await run.step(epoch, 0, 0, 0)
    await run.admit(1)
    await run.end(1)


async def _twice_in_the_lineage(run: Planted) -> None:
    epoch = await run.start()
    v1 = await run.step(epoch, 0, 0, 0)
    await run.batch(epoch, 1, 0, sequence=run.rows[0, 0].sequence)
    await run.commit(epoch, v1, 2)


async def _a_second_batch(run: Planted) -> None:
    epoch = await run.start()
    await run.admit(0)
    await run.sample(0, 0, 0)
    await run.batch(epoch, 0, 0)
    await run.admit(1)
    await run.sample(1, 0, 0)
    await run.batch(epoch, 0, 1)


async def _of_no_batch(run: Planted) -> None:
    epoch = await run.start()
    await run.commit(epoch, 0, 1, cursor=1)


async def _a_wrong_cursor(run: Planted) -> None:
    epoch = await run.start()
    await run.admit(0)
    await run.sample(0, 0, 0)
    await run.batch(epoch, 0, 0)
    await run.commit(epoch, 0, 1, cursor=2)


async def _a_fenced_writer(run: Planted) -> None:
    await run.start()
    await run.admit(0)
    run.writer = "zombie"
    await run.drop(0)


async def _over_stale(run: Planted) -> None:
    epoch = await run.start()
    v1 = await run.step(epoch, 0, 0, 0)
    await run.admit(1)
    await run.sample(1, 0, 1)
    await run.batch(epoch, 1, 1)
    await run.commit(epoch, v1, 2)


async def _of_an_unknown_version(run: Planted) -> None:
    epoch = await run.start()
    await run.admit(0)
    await run.sample(0, 99, 0)
    await run.batch(epoch, 0, 0)


async def _off_the_line(run: Planted) -> None:
    epoch = await run.start()
    v1 = await run.step(epoch, 0, 0, 0)
    again = await run.open(0, 0)
    await run.admit(1)
    await run.sample(1, v1, 0)
    await run.batch(again, 0, 1)


async def _ahead_of_its_batch(run: Planted) -> None:
    epoch = await run.start()
    v1 = await run.step(epoch, 0, 0, 0)
    await run.step(epoch, v1, 1, 1)
    await run.admit(2)
    await run.sample(2, v1, 1)
    run.sequences.clear()
    await run.batch(epoch, 0, 2)


async def _half_a_group_in_a_batch(run: Planted) -> None:
    epoch = await run.start()
    await run.admit(0)
    await run.sample(0, 0, 0, only=(0,))
    await run.batch(epoch, 0, 0)


async def _other_bytes(run: Planted) -> None:
    epoch = await run.start()
    await run.admit(0)
    await run.sample(0, 0, 0)
    await run.batch(epoch, 0, 0, digest=digest(b"other bytes"))


async def _another_samples_bytes(run: Planted) -> None:
    epoch = await run.start()
    await run.admit(0)
    await run.sample(0, 0, 0)
    other = run.rows[0, 1]
    await run.batch(epoch, 0, 0, sequence=other.sequence, digest=other.digest)


async def _nothing_there(run: Planted) -> None:
    epoch = await run.start()
    await run.admit(0)
    await run.sample(0, 0, 0)
    await run.batch(epoch, 0, 0, sequence=99)


async def _no_trajectory(run: Planted) -> None:
    epoch = await run.start()
    await run.admit(0)
    await run.sample(0, 0, 0)
    garbage = b"\x81\xa6schema\x01"
    at = await run.bus.publish(run.bus.topology.trajectory(0, 5), garbage)
    await run.batch(epoch, 0, 0, sequence=at, digest=digest(garbage))


async def _another_reward(run: Planted) -> None:
    epoch = await run.start()
    await run.admit(0)
    await run.sample(0, 0, 0)
    await run.batch(epoch, 0, 0, reward=1.0)


async def _another_mean(run: Planted) -> None:
    await run.start()
    await run.admit(0, version=0)
    await run.sample(0, 0, 0)
    await run.evaluate(0, 0, 0, mean=0.9)


async def _evaluated_by_another_version(run: Planted) -> None:
    epoch = await run.start()
    v1 = await run.step(epoch, 0, 0, 0)
    await run.admit(1, version=v1)
    await run.sample(1, 0, 0)
    await run.evaluate(v1, 1, 1)


@pytest.mark.parametrize(
    ("plant", "invariant", "where", "what"),
    [
        (_dropped_though_trained, 1, "0.0", "dropped as stale while it stands in batch 1/0"),
        (_dropped_twice, 1, "group 0", "dropped as stale after it was closed (deadline)"),
        (_trained_though_dropped, 1, "0.1", "trained at depth 0 and deadline"),
        (_evaluated_and_dropped, 1, "0.0", "evaluated for version 0 after its group was closed (version_gone)"),
        (_admitted_twice, 1, "0.0", "admitted twice"),
        (_never_admitted, 1, "7.0", "in batch 1/0, never admitted"),
        (_half_a_group, 1, "group 0", "1 of its 2 samples were admitted"),
        (_open_after_the_end, 1, "1.1", "still open though the run ended (steps)"),
        (_twice_in_the_lineage, 2, "0.0", "trained at depth 0 and at depth 1"),
        (_a_second_batch, 2, "1/0", "a second batch for this epoch and depth"),
        (_of_no_batch, 2, "1/0", "the lineage consumed a batch that isn't in CONTROL"),
        (_a_wrong_cursor, 2, "version 2", "CONTROL 2, its batch cursor, isn't batch 1/0"),
        (_a_fenced_writer, 2, "CONTROL 5", "written by 'zombie' where 'b' had taken over: a fence broke"),
        (_over_stale, 3, "1.0", "in batch 1/1 with tokens of depth 0: staleness 1 is over 0"),
        (_over_stale, 3, "1.1", "batch 1/1 says least depth 1, its tokens have 0"),
        (_of_an_unknown_version, 3, "0.1", "sampled by version 99, which the LOG hasn't"),
        (_off_the_line, 3, "1.0", "in batch 3/0 with tokens of version 2, which is off the line"),
        (_ahead_of_its_batch, 3, "2.0", "in batch 1/0 with tokens of depth 1, which had consumed that batch already"),
        (_half_a_group_in_a_batch, 4, "group 0", "in batch 1/0 with samples [0] of 2"),
        (_other_bytes, 6, "0.0", "the bytes at TRAJECTORY 1 have digest"),
        (_another_samples_bytes, 6, "0.0", "the trajectory at 2 is of"),
        (_nothing_there, 6, "0.0", "TRAJECTORY has no message 99"),
        (_no_trajectory, 6, "0.0", "the trajectory at 3 can't be read"),
        (_another_reward, 6, "0.0", "its reward is 1.0, its score 0.5"),
        (_another_mean, 6, "version 0", "evaluated with mean 0.9, its rows have 0.5"),
        (_evaluated_by_another_version, 3, "1.0", "evaluated for version 2, sampled by [0]"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else None,
)
async def test_a_planted_violation_is_found_and_named(
    planted: Planted, plant: Plant, invariant: int, where: str, what: str
) -> None:
    await plant(planted)
    report = await planted.audit()
    found = [(violation.invariant, violation.where) for violation in report.violations if what in violation.what]
    assert (invariant, where) in found, report.lines()
    assert not report.clean
    assert any(line.startswith("VIOLATED") and what in line for line in report.lines())


@pytest.mark.parametrize("planted", [1], indirect=True)
async def test_staleness_within_the_bound_is_no_violation(planted: Planted) -> None:
    epoch = await planted.start()
    v1 = await planted.step(epoch, 0, 0, 0)
    await planted.admit(1)
    await planted.sample(1, 0, 0)
    await planted.batch(epoch, 1, 1)
    await planted.commit(epoch, v1, 2)
    report = await planted.audit()
    assert report.clean, report.lines()
    assert report.staleness_max == 1
