"""Bit-exact replay: train the line again from its recorded batches, and compare every version's digest with the LOG.

It does what the trainer did and nothing else: entry 0's weights (or a checkpoint's), each epoch with the settings it recorded and
as many ranks, its batches in order, their rows by sequence and digest. What began with a restart begins with one here, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from towline.bundle.line import BatchAt, Batches, Step, is_purged, read_batches, replay_start, steps
from towline.bundle.source import Source
from towline.bus.topology import TRAJECTORY
from towline.errors import InvariantError, MissingError
from towline.replay.again import Again, Payloads, Taken, epoch_settings
from towline.replay.code import check_code
from towline.replay.report import VerifyReport, VersionResult
from towline.store import checkpoints

Tell = Callable[[VersionResult], None]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Versions one after the other that as many ranks trained."""

    ranks: int
    threads: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """A stretch to train again."""

    stretch: Stretch
    report: VerifyReport
    """What was found so far; the stretch's results are added."""
    changes: Mapping[str, Any]
    go_on: bool
    scratch: Path
    handed_over: Path | None
    leave: Path | None
    """Where the learner's checkpoint goes at the stretch's end."""
    tell: Tell


Launch = Callable[[Job], Awaitable[None]]
"""Trains a stretch of several ranks again, in processes of their own."""


async def verify(
    source: Source,
    *,
    start: int = 0,
    end: int | None = None,
    changes: dict[str, Any] | None = None,
    go_on: bool = False,
    tell: Tell = lambda result: None,
    launch: Launch | None = None,
    code: Path | None = None,
) -> VerifyReport:
    """Train versions `start` (0, or one with a checkpoint) to `end` (None: the line's latest) again.

    changes: "section.key" -> value, to see what another setting would have done. go_on: past the first difference, as it always
    does where the environment isn't the recorded one. launch: starts ranks where the run had several; without it this process
    trains alone, which is said in the report. code: the folder whose modules a bundle may name (`check_code`). `UsageError` or
    `MissingError` where it can't begin.
    """
    log = source.log
    last = log.lineage.latest if end is None else end
    batches = await read_batches(source)
    planned = steps(log, batches, start, last)
    await _check_history(source, batches, planned, start)
    changes = changes or {}
    for epoch in sorted({step.entry.epoch for step in planned}):
        check_code(source, epoch_settings(source, epoch, changes, one_process=True)[0], changes, code)
    report = VerifyReport(run=source.settings.run.name, start=start, end=last, planned=len(planned), changed=dict(changes))
    found = stretches(source, planned, changes, one_process=launch is None)
    with TemporaryDirectory(prefix="towline-replay-") as scratch:
        handed_over: Path | None = None
        for number, stretch in enumerate(found):
            leave = Path(scratch, f"stretch-{number}") if number + 1 < len(found) else None
            job = Job(stretch, report, changes, go_on, Path(scratch), handed_over, leave, tell)
            if stretch.ranks > 1 and launch is not None:
                await launch(job)
            else:
                await _here(source, job, one_process=launch is None)
            wanted = sum(len(each.steps) for each in found[: number + 1])
            if len(report.results) < wanted or not report.goes_on(go_on):
                break
            handed_over = leave
    return report


async def _check_history(source: Source, batches: Batches, planned: Sequence[Step], start: int) -> None:
    """`MissingError` where what the first versions were trained on was purged: with what begins later, if anything does."""
    first = (await source.state(TRAJECTORY)).first
    if not planned or not (planned[0].lost or is_purged(planned[0], first)):
        return
    run = source.settings.run.name
    since = await asyncio.to_thread(
        replay_start, source.log, batches, first, lambda name: checkpoints.exists(source.objects, run, name)
    )
    way_out = "no checkpoint follows, so nothing of it can be trained again" if since is None else f"begin with --from {since}"
    raise MissingError(
        f"{source.where}: the batches or samples that version {planned[0].entry.number} was trained on after {start} were purged "
        f"(buffer.keep_history); {way_out}",
        code="history_purged",
    )


def stretches(source: Source, planned: Sequence[Step], changes: Mapping[str, Any], *, one_process: bool = False) -> list[Stretch]:
    """By the number of ranks of each version's epoch."""
    shapes: dict[int, tuple[int, int]] = {}
    found: list[tuple[tuple[int, int], list[Step]]] = []
    for step in planned:
        epoch = step.entry.epoch
        if epoch not in shapes:
            trainer = epoch_settings(source, epoch, changes, one_process=one_process)[0].trainer
            shapes[epoch] = (trainer.ranks, trainer.threads)
        if not found or found[-1][0][0] != shapes[epoch][0]:
            found.append((shapes[epoch], []))
        found[-1][1].append(step)
    return [Stretch(ranks, threads, tuple(taken)) for (ranks, threads), taken in found]


async def train_again(
    source: Source,
    planned: Sequence[Step],
    report: VerifyReport,
    take: Callable[[Step, Payloads], Awaitable[Taken]],
    *,
    go_on: bool,
    tell: Callable[[Taken], None],
) -> None:
    """Each step by `take`, into the report, until one differs."""
    for step in planned:
        if step.lost:
            lost = ", ".join(map(str, step.lost))
            report.stopped = (
                f"version {step.entry.number}: CONTROL has no batch for depth {lost} any more; start from a later checkpoint"
            )
            return
        payloads = [await _payloads(source, batch) for batch in step.batches]
        try:
            taken = await take(step, payloads)
        except InvariantError as error:
            report.stopped = f"version {step.entry.number}: {error.message}"
            return
        report.add(taken.result, None if taken.opened is None else (taken.opened.epoch, taken.opened.differences))
        tell(taken)
        if not report.goes_on(go_on):
            return


async def _here(source: Source, job: Job, *, one_process: bool) -> None:
    """In this process, and one thread of it: how many threads a math library uses is a property of the one that asks."""
    start = job.report.start
    again = Again(source, job.scratch, start, job.changes, handed_over=job.handed_over, one_process=one_process)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, "towline-replay") as pool:
        await loop.run_in_executor(pool, again.prepare)

        async def take(step: Step, payloads: Payloads) -> Taken:
            return await loop.run_in_executor(pool, again.take, step.entry, step.batches, payloads)

        before = len(job.report.results)
        await train_again(source, job.stretch.steps, job.report, take, go_on=job.go_on, tell=lambda taken: job.tell(taken.result))
        if job.leave is not None and len(job.report.results) - before == len(job.stretch.steps):
            await loop.run_in_executor(pool, again.leave, job.leave)


async def _payloads(source: Source, batch: BatchAt) -> list[bytes | str]:
    messages = await source.get_many(TRAJECTORY, [row.sequence for row in batch.record.rows])
    return ["lost" if message is None else message.data for message in messages]
