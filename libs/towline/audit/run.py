"""`towline audit`: DESIGN 5's invariants, checked from the two logs and the streams alone, on a live or a finished run.

It shares no code with the buffer: it reads the records itself and recomputes what they claim.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from towline.audit.ledger import Ledger, SampleKey
from towline.audit.line import Line
from towline.audit.payloads import Bound, Checker, rows_of
from towline.audit.report import AuditReport, Violation
from towline.bus.client import Bus
from towline.bus.topology import CONTROL, OUTCOME, TRAJECTORY
from towline.config import Settings
from towline.contract.control import decode_control
from towline.contract.entries import LogEntry
from towline.contract.outcome import Score, decode_outcome
from towline.errors import MalformedError, UnavailableError
from towline.store.log import Log

ROWS_AT_A_TIME = 256
"""Trajectories held in memory together."""
OVER_STALE: dict[str, Literal["mask", "keep"]] = {"mask_stale_tokens": "mask", "keep": "keep"}
"""buffer.over_stale -> what a batch record may say; others allow no row over the bound."""
_TRIES = 5


async def audit(bus: Bus, log: Log, settings: Settings) -> AuditReport:
    """Audit the run of `settings` on `bus` and in `log`. It only reads.

    Raises `UnavailableError` where bus or store can't be had, or where the lineage turns elsewhere at every try.
    """
    ledger, line = await _read_both_logs(bus, log)
    consumed = line.consumed()
    counts = ledger.close(consumed)
    ledger.check_cursors(line)
    scores, scores_whole = await _read_scores(bus)
    log_now = Line(await _entries(log))  # a batch of a live run may hold versions that were committed meanwhile
    bound = Bound(
        settings.run.name, settings.buffer.max_staleness, _keeps_off_line(settings), OVER_STALE.get(settings.buffer.over_stale)
    )
    checker = Checker(bound, ledger, log_now, scores, scores_whole)
    checked, purged = await _check_rows(bus, ledger, checker)
    purged_messages = {
        spec.key: max((await bus.stream_state(spec)).first_sequence - 1, 0) for spec in (CONTROL, OUTCOME, TRAJECTORY)
    }
    violations = [*ledger.violations, *checker.violations]
    if not counts.balanced:
        violations.append(Violation(1, "the run", f"the counts don't add up: {counts}"))
    return AuditReport(
        run=settings.run.name,
        finished=ledger.ended is not None,
        end_reason=ledger.ended.reason if ledger.ended is not None else None,
        depth=len(consumed),
        versions=len(log_now.version_epochs),
        batches=sum(not batch.void for batch in ledger.batches),
        counts=counts,
        rows_checked=checked,
        rows_purged=purged,
        purged=purged_messages,
        batches_purged=ledger.purged_batches,
        staleness_max=checker.staleness_max,
        over_stale={"rows": checker.over_rows, "tokens": checker.over_tokens, "max": checker.over_most},
        violations=violations,
    )


def _keeps_off_line(settings: Settings) -> bool:
    return settings.buffer.off_line == "keep" and settings.buffer.max_staleness > 0


async def _entries(log: Log) -> list[LogEntry]:
    await asyncio.to_thread(log.refresh)
    return log.entries()


async def _read_both_logs(bus: Bus, log: Log) -> tuple[Ledger, Line]:
    """The LOG, then CONTROL: so each batch that the one has consumed stands in the other. Where the lineage turned elsewhere
    meanwhile, CONTROL may have voided what the LOG read here still counts: both are read again."""
    for _ in range(_TRIES):
        line = Line(await _entries(log))
        ledger = Ledger()
        async for message in bus.read(CONTROL, follow=False):
            ledger.read(decode_control(message.data), message.sequence)
        before, after = line.consumed(), Line(await _entries(log)).consumed()
        if after[: len(before)] == before:
            return ledger, line
    raise UnavailableError("the lineage turned elsewhere during each reading; audit again later", code="lineage_moves")


async def _read_scores(bus: Bus) -> tuple[dict[SampleKey, Score], bool]:
    """Each sample's first score; whether all scores ever given were there to read."""
    scores: dict[SampleKey, Score] = {}
    whole = (await bus.stream_state(OUTCOME)).first_sequence <= 1
    async for message in bus.read(OUTCOME, follow=False):
        try:
            outcome = decode_outcome(message.data)
        except MalformedError:
            continue  # nobody may act on it: a row that needs it is found to have no score
        if isinstance(outcome, Score):
            scores.setdefault((outcome.group, outcome.sample), outcome)
    return scores, whole


async def _check_rows(bus: Bus, ledger: Ledger, checker: Checker) -> tuple[int, int]:
    """How many rows were compared with their trajectory, and how many trajectories are purged."""
    rows = rows_of(ledger)
    floor = (await bus.stream_state(TRAJECTORY)).first_sequence
    kept = [row for row in rows if row.sequence >= floor]
    passed = 0
    for start in range(0, len(kept), ROWS_AT_A_TIME):
        part = kept[start : start + ROWS_AT_A_TIME]
        messages = await bus.get_many(TRAJECTORY, [row.sequence for row in part])
        if None in messages:  # a live run's janitor may have come by
            floor = (await bus.stream_state(TRAJECTORY)).first_sequence
        for row, message in zip(part, messages, strict=True):
            if message is None and row.sequence < floor:
                passed += 1
                continue
            checker.check(row, None if message is None else message.data)
    return len(kept) - passed, len(rows) - len(kept) + passed
