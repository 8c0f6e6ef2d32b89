"""Which batches a second trainer is fed: the recorded ones of a line, or the recorded trajectories put into batches anew.

Selection takes whole groups, so that what a sample was worth among the others of its group stays what it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from towline.bundle.line import read_batches, steps
from towline.bundle.select import Filter, Selected, select
from towline.bundle.source import Source
from towline.contract.codec import digest
from towline.contract.control import BatchRow, OverStale, OverStaleRow
from towline.errors import MissingError, UsageError


@dataclass(frozen=True, slots=True)
class FedBatch:
    """A batch as it is fed; its rows are the source's."""

    at: float
    """Unix seconds: when it was recorded, or when its last sample came."""
    newest_depth: int
    """What the rows' staleness counts from: the recorded batch's depth, or the newest depth among its samples."""
    recorded_depth: int | None
    """None where it was put together anew."""
    rows: tuple[BatchRow, ...]
    over_stale: OverStale | msgspec.UnsetType = msgspec.UNSET


@dataclass(slots=True)
class Plan:
    """`batches` in order. `left_out` counts what was chosen and can't be fed, by reason."""

    batches: list[FedBatch]
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> Iterator[BatchRow]:
        return (row for batch in self.batches for row in batch.rows)

    @property
    def groups(self) -> int:
        return len({row.group for row in self.rows})


async def recorded(source: Source, start: int, end: int | None, wanted: Filter) -> Plan:
    """The batches from version `start` to `end` (None: the line's latest), of each the groups that `wanted` takes a sample of.

    `MissingError` where one isn't in CONTROL any more.
    """
    planned = steps(source.log, await read_batches(source), start, end)
    lost = next((step for step in planned if step.lost), None)
    if lost is not None:
        raise MissingError(
            f"{source.where}: CONTROL has no batch for depth {lost.lost[0]} any more; begin with --from at version "
            f"{lost.entry.number} or later",
            code="batch_lost",
        )
    chosen: set[int] | None = None
    if wanted != Filter():
        async with contextlib.aclosing(select(source, wanted)) as found:
            chosen = {item.trajectory.group async for item in found if item.trajectory is not None}
    batches = []
    for step in planned:
        for batch in step.batches:
            record = batch.record
            places = [place for place, row in enumerate(record.rows) if chosen is None or row.group in chosen]
            if not places:
                continue
            batches.append(
                FedBatch(
                    at=record.at,
                    newest_depth=record.for_depth,
                    recorded_depth=record.for_depth,
                    rows=tuple(record.rows[place] for place in places),
                    over_stale=_over_stale(record.over_stale, places),
                )
            )
    return Plan(batches)


async def batched_anew(source: Source, groups: int, wanted: Filter) -> Plan:
    """Every whole, scored group that `wanted` takes a sample of, `groups` a batch, in the order in which they became whole.

    Groups that were dropped too: a replay may want what the run didn't. The last batch may be smaller. Eval groups aren't taken.
    """
    if wanted.lane == "eval":
        raise UsageError("--lane eval: a trainer isn't fed what a policy was evaluated with", code="lane")
    members: dict[int, dict[int, Selected]] = {}
    taken: set[int] = set()
    everything = Filter()
    if wanted != everything:
        async with contextlib.aclosing(select(source, wanted)) as found:
            taken = {item.trajectory.group async for item in found if item.trajectory is not None}
    whole: list[tuple[float, int, tuple[BatchRow, ...]]] = []
    left_out: dict[str, int] = {}
    async with contextlib.aclosing(select(source, everything)) as found:
        async for item in found:
            t = item.trajectory
            if t is None or t.lane == "eval" or (wanted != everything and t.group not in taken):
                continue
            group = members.setdefault(t.group, {})
            group[t.sample] = item
            if len(group) < t.group_size:
                continue
            rows = _rows(source, [group[sample] for sample in sorted(group)])
            if isinstance(rows, str):
                left_out[rows] = left_out.get(rows, 0) + 1
            else:
                whole.append((item.message.at, max(row[1] for row in rows), tuple(row[0] for row in rows)))
            del members[t.group]
    if members:
        left_out["not whole"] = len(members)
    batches = []
    for place in range(0, len(whole), groups):
        part = whole[place : place + groups]
        batches.append(
            FedBatch(
                at=part[-1][0],
                newest_depth=max(newest for _, newest, _ in part),
                recorded_depth=None,
                rows=tuple(row for _, _, rows in part for row in rows),
            )
        )
    return Plan(batches, left_out)


def _rows(source: Source, items: list[Selected]) -> list[tuple[BatchRow, int]] | str:
    """Each sample's row and the newest depth among its tokens' versions; or why the group can't be fed."""
    lineage = source.log.lineage
    found = []
    for item in items:
        t, score = item.trajectory, item.score
        assert t is not None
        if score is None:
            return "not scored"
        if score.trajectory_digest != digest(item.message.data):
            return "scored for other bytes"
        try:
            depths = [lineage.effective_depth(span.version) for span in t.version_spans]
        except MissingError:
            return "of an unknown version"
        row = BatchRow(
            t.group, t.sample, item.message.sequence, score.trajectory_digest, score.reward, min(depths), t.policy_tokens
        )
        found.append((row, max(depths)))
    return found


def _over_stale(said: OverStale | msgspec.UnsetType, places: list[int]) -> OverStale | msgspec.UnsetType:
    """The record's word on the rows that are left."""
    if not isinstance(said, OverStale):
        return msgspec.UNSET
    tokens = {item.row: item.tokens for item in said.rows}
    rows = tuple(OverStaleRow(new, tokens[old]) for new, old in enumerate(places) if old in tokens)
    return msgspec.structs.replace(said, rows=rows) if rows else msgspec.UNSET
