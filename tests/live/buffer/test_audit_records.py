"""The auditor on rows over the bound, requeued prompts and groups from outside: what is spoiled is found and named."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from live.buffer.harness import connected, settings_for
from live.buffer.planting import SIZE, Planted
from towline.config import BusSettings, StoreSettings
from towline.contract.control import AdmitRecord, DropRecord, OverStale, OverStaleRow, RequeueRecord, TaskRecord
from towline.contract.groups import EXTERNAL
from towline.contract.task import Task, pack_tokens

Plant = Callable[[Planted], Awaitable[None]]


@pytest.fixture
async def planted(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, request: pytest.FixtureRequest
) -> AsyncIterator[Planted]:
    buffer = {"group_size": SIZE, "groups_per_batch": 1, "max_staleness": 0} | getattr(request, "param", {})
    settings = settings_for(run_name, bus_settings, file_store_settings, buffer=buffer, trainer={"correction": "tis"})
    async with connected(settings) as (bus, objects):
        yield Planted(bus, objects, settings)


def task_of(run: Planted, group: int, sample: int = 0) -> Task:
    return run.tasks[group, sample][1]


# rows over the bound


async def stale_batch(run: Planted, over: OverStale | None) -> None:
    """Batch 1 holds group 1, which version 0 sampled: two tokens of each of its samples are over the bound of 0."""
    epoch = await run.start()
    v1 = await run.step(epoch, 0, 0, 0)
    await run.admit(1)
    await run.sample(1, 0, 0)
    await run.batch(epoch, 1, 1, over_stale=over)
    await run.commit(epoch, v1, 2)


def over_stale(mode: Any = "mask", first: int = 2, second: int = 2, most: int = 0) -> OverStale:
    rows = tuple(OverStaleRow(place, tokens) for place, tokens in enumerate((first, second)) if tokens)
    return OverStale(mode=mode, max_staleness=most, rows=rows)


@pytest.mark.parametrize("planted", [{"over_stale": "mask_stale_tokens"}, {"over_stale": "keep"}], indirect=True)
async def test_rows_over_the_bound_that_the_record_names_and_the_run_allows_are_clean_and_counted_apart(planted: Planted) -> None:
    mode = "keep" if planted.settings.buffer.over_stale == "keep" else "mask"
    await stale_batch(planted, over_stale(mode))
    report = await planted.audit()
    assert report.clean, report.lines()
    assert (report.staleness_max, report.over_stale) == (0, {"rows": 2, "tokens": 4, "max": 1})
    assert any("4 tokens in 2 rows" in line for line in report.lines())


@pytest.mark.parametrize(
    ("planted", "over", "what"),
    [
        ({}, over_stale(), "says to mask what is over the bound, buffer.over_stale doesn't"),
        ({"over_stale": "keep"}, over_stale(), "says to mask what is over the bound, buffer.over_stale doesn't"),
        ({"over_stale": "mask_stale_tokens"}, over_stale("keep"), "says to keep what is over the bound"),
        ({"over_stale": "mask_stale_tokens"}, over_stale(second=1), "says 1 of its tokens are over the bound, 2 are"),
        ({"over_stale": "mask_stale_tokens"}, over_stale(second=0), "with tokens of depth 0: staleness 1 is over 0"),
        ({"over_stale": "mask_stale_tokens"}, None, "with tokens of depth 0: staleness 1 is over 0"),
        ({"over_stale": "mask_stale_tokens"}, over_stale(most=1), "with tokens of depth 0: staleness 1 is over 0"),
    ],
    indirect=["planted"],
)
async def test_a_false_word_about_rows_over_the_bound_is_found(planted: Planted, over: OverStale | None, what: str) -> None:
    if over is not None and over.max_staleness == 1:
        over = replace(over, rows=())  # judged by a looser bound than the run's, nothing is over it
    await stale_batch(planted, over)
    report = await planted.audit()
    found = [violation for violation in report.violations if what in violation.what]
    assert found, report.lines()
    assert {violation.invariant for violation in found} == {3}


# requeued prompts


async def requeue(run: Planted, group: int, *, dead: int = 7, task: Task | None = None) -> None:
    await run.control(RequeueRecord(writer="", dead=dead, group=group, task=task or task_of(run, group)))


async def admit_again(run: Planted, group: int, old: int, *, prompt: list[int] | None = None) -> None:
    for sample in range(SIZE):
        task = task_of(run, old)
        changes = {"group": group, "sample": sample} | ({} if prompt is None else {"prompt": pack_tokens(prompt)})
        task = replace(task, **changes)
        run.tasks[group, sample] = (await run.control(TaskRecord(writer="", task=task, requeues=old)), task)


async def dropped(run: Planted, *, promised: bool) -> None:
    await run.start()
    await run.admit(0)
    again: dict[str, Any] = {"requeue": True} if promised else {}
    await run.control(DropRecord(writer="", lane="train", group=0, samples=SIZE, reason="stale", **again))


async def test_promised_and_requested_prompts_that_come_again_once_are_clean(planted: Planted) -> None:
    await dropped(planted, promised=True)
    await admit_again(planted, 1, 0)
    await planted.drop(1, "verify_failed")
    await requeue(planted, 1)
    await admit_again(planted, 2, 1)
    report = await planted.audit()
    assert report.clean, report.lines()
    assert report.counts.dropped == {"stale": 2, "verify_failed": 2}


async def _nobody_promised(run: Planted) -> None:
    await dropped(run, promised=False)
    await admit_again(run, 1, 0)


async def _twice_again(run: Planted) -> None:
    await dropped(run, promised=True)
    await admit_again(run, 1, 0)
    await admit_again(run, 2, 0)


async def _another_prompt(run: Planted) -> None:
    await dropped(run, promised=True)
    await admit_again(run, 1, 0, prompt=[9, 9])


async def _new_ones_first(run: Planted) -> None:
    await dropped(run, promised=True)
    await run.admit(1)


async def _requested_though_promised(run: Planted) -> None:
    await dropped(run, promised=True)
    await requeue(run, 0)


async def _requested_twice(run: Planted) -> None:
    await dropped(run, promised=False)
    await requeue(run, 0)
    await requeue(run, 0, dead=8)


async def _requested_though_open(run: Planted) -> None:
    await run.start()
    await run.admit(0)
    await requeue(run, 0)


async def _requested_though_evaluated(run: Planted) -> None:
    await run.start()
    await run.admit(0, version=0)
    await run.sample(0, 0, 0)
    await run.evaluate(0, 0, 0)
    await requeue(run, 0)


async def _requested_with_another_prompt(run: Planted) -> None:
    await dropped(run, promised=False)
    await requeue(run, 0, task=replace(task_of(run, 0), prompt=pack_tokens([4, 4])))


# from outside


async def take_in(run: Planted, group: int = -5, *, size: int = SIZE, samples: int = SIZE, lane: str = EXTERNAL) -> None:
    for sample in range(samples):
        await run.control(AdmitRecord(writer="", lane=lane, group=group, sample=sample, group_size=size))


async def send(run: Planted, group: int = -5, **changes: Any) -> None:
    """Trajectories and scores from outside."""
    for sample in range(SIZE):
        base = task_of(run, 99)
        task = replace(base, **({"lane": EXTERNAL, "group": group, "sample": sample} | changes))
        run.tasks[group, sample] = (0, task)
    await run.sample(group, 0, 0)


async def outside(run: Planted, **changes: Any) -> int:
    epoch = await run.start()
    await run.admit(99)
    await run.drop(99)
    await send(run, **changes)
    return epoch


async def test_a_group_from_outside_that_is_admitted_whole_and_one_that_is_turned_away_are_clean(planted: Planted) -> None:
    epoch = await outside(planted)
    await take_in(planted)
    await planted.control(DropRecord(writer="", lane=EXTERNAL, group=-6, samples=0, reason="unpaced", offered=1))
    await planted.batch(epoch, 0, -5)
    await planted.commit(epoch, 0, 1)
    report = await planted.audit()
    assert report.clean, report.lines()
    assert (report.counts.admitted, report.counts.trained, report.counts.turned_away) == (4, 2, {"unpaced": 1})
    assert any("never admitted: 1 unpaced" in line for line in report.lines())


async def _in_a_batch_unadmitted(run: Planted) -> None:
    epoch = await outside(run)
    await run.batch(epoch, 0, -5)


async def _half_admitted(run: Planted) -> None:
    await outside(run)
    await take_in(run, samples=1)


async def _admitted_though_turned_away(run: Planted) -> None:
    await outside(run)
    await run.control(DropRecord(writer="", lane=EXTERNAL, group=-5, samples=0, reason="unpaced", offered=2))
    await take_in(run)


async def _turned_away_though_admitted(run: Planted) -> None:
    await outside(run)
    await take_in(run)
    await run.control(DropRecord(writer="", lane=EXTERNAL, group=-5, samples=0, reason="unpaced", offered=2))


async def _admitted_twice(run: Planted) -> None:
    await outside(run)
    await take_in(run)
    await take_in(run)


async def _a_task_for_one(run: Planted) -> None:
    await run.start()
    await run.admit(-5)


async def _of_the_buffers_numbers(run: Planted) -> None:
    await run.start()
    await take_in(run, 3)


async def _for_a_task(run: Planted) -> None:
    epoch = await outside(run)
    sequence, _ = run.tasks[99, 0]
    run.tasks[-5, 0] = (sequence, run.tasks[-5, 0][1])
    await run.sample(-5, 0, 0, only=(0,))
    await take_in(run)
    await run.batch(epoch, 0, -5)


async def _of_another_size(run: Planted) -> None:
    epoch = await outside(run, group_size=3)
    await take_in(run)
    await run.batch(epoch, 0, -5)


@pytest.mark.parametrize(
    ("plant", "invariant", "where", "what"),
    [
        (_nobody_promised, 1, "group 1", "has the prompt of group 0 again, which no drop or request promised"),
        (_twice_again, 1, "group 2", "has the prompt of group 0 again, as group 1 has already"),
        (_another_prompt, 1, "group 1", "has another prompt than group 0"),
        (_new_ones_first, 1, "group 1", "drawn anew while the prompt of group 0 waits"),
        (_requested_though_promised, 1, "group 0", "its prompt had been promised before"),
        (_requested_twice, 1, "group 0", "its prompt had been promised before"),
        (_requested_though_open, 1, "group 0", "it isn't a train group that was dropped"),
        (_requested_though_evaluated, 1, "group 0", "it isn't a train group that was dropped"),
        (_requested_with_another_prompt, 1, "group 0", "with another prompt than its own"),
        (_in_a_batch_unadmitted, 1, "-5.0", "in batch 1/0, never admitted"),
        (_half_admitted, 1, "group -5", "1 of its 2 samples were admitted"),
        (_admitted_though_turned_away, 1, "-5.0", "admitted after its group was closed (unpaced)"),
        (_turned_away_though_admitted, 1, "group -5", "turned away as unpaced after it was admitted"),
        (_admitted_twice, 1, "-5.1", "admitted twice"),
        (_a_task_for_one, 1, "-5.0", "a task for an external group"),
        (_of_the_buffers_numbers, 1, "3.0", "it must be below 0"),
        (_for_a_task, 6, "-5.0", "an external sample of lane external, for CONTROL"),
        (_of_another_size, 6, "-5.0", "admitted as one of 2, sampled as one of 3"),
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
