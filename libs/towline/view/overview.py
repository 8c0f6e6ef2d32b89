"""The pages about the run as a whole, made of what was read: overview, curves, versions, replicas."""

from __future__ import annotations

import time
from collections import Counter

from towline.contract.entries import BaseEntry, VersionEntry
from towline.replica.fleet import Fleet, fleet_of
from towline.report.progress import progress_of
from towline.view.answers import (
    AckSeen,
    Curves,
    Overview,
    ReplicaRow,
    Replicas,
    ServiceNow,
    StreamNow,
    VersionRow,
    Versions,
)
from towline.view.reading import Reading
from towline.view.thinning import buckets, mean, spread

MOST_POINTS = 400
STOPPED = "stopped"
"""What a service that ends gives as its last reason."""


def reading_share(reading: Reading) -> float | None:
    return None if reading.caught_up else reading.share


def overview(reading: Reading) -> Overview:
    source, now, decisions = reading.feed.source, reading.now, reading.decisions
    log, settings = source.log, source.settings
    lineage = log.lineage
    known = bool(lineage.versions())
    line = reading.line()
    entries = reading.made()
    base = log.entry(0) if known else None
    progress = progress_of(reading.book, steps=settings.run.steps, max_staleness=settings.buffer.max_staleness)
    evals = _evals(reading)
    fleet = _fleet(reading)
    counts = reading.samples.counts(reading.consumed())
    buffer = reading.book.one("buffer")
    live = reading.feed.live and any(one.reason != STOPPED for one in now.statuses)
    times = [entry.at for entry in entries[-1:]] + [batch.point.at for batch in line.batches[-1:]]
    return Overview(
        run=settings.run.name, where=source.where, live=live, at=now.at,
        reading=reading_share(reading), problem=reading.problem or (progress.problem if live else ""),
        began_at=None if base is None else base.at, last_at=max(times, default=None),
        ended=None if decisions.ended is None else decisions.ended.reason, state=str(buffer.get("state") or ""),
        depth=lineage.depth(lineage.latest) if known else 0, steps=settings.run.steps, version=lineage.latest if known else None,
        versions=len(entries), epochs=reading.epochs,
        max_staleness=settings.buffer.max_staleness, environment=settings.prompts.environment, engine=settings.rollout.engine,
        base=base.source if isinstance(base, BaseEntry) else "", batches=len(line.batches),
        trained_samples=line.rows, trained_tokens=line.policy_tokens,
        reward_train=line.batches[-1].point.reward_mean if line.batches else None,
        reward_held_out=evals[-1][1] if evals else None,
        reward_held_out_first=evals[0][1] if evals else None, held_out_depth=evals[-1][0] if evals else None,
        staleness=dict(sorted(line.staleness.items())),
        trajectories_per_s=progress.trajectories_per_s if live else None,
        tokens_per_s=progress.tokens_per_s if live else None,
        delta_bytes_mean=mean([entry.wire_bytes for entry in entries]) if entries else None,
        delta_share_mean=mean([entry.wire_bytes / max(entry.model_bytes, 1) for entry in entries]) if entries else None,
        states=counts, kept=sum(counts.values()), trajectories=reading.samples.newest, dropped=dict(decisions.drops),
        failures=dict(reading.failures), dead=dict(reading.dead_by_stage), serving=list(fleet.serving.items()),
        replicas=len(fleet.members), publish_to_all_p50_seconds=fleet.publish_to_all_p50_seconds,
        publish_to_all_p99_seconds=fleet.publish_to_all_p99_seconds,
        services=[
            ServiceNow(service=one.service, replica=one.replica, ready=one.ready, reason=one.reason, seen_at=one.at)
            for one in now.statuses
        ],
        streams=[
            StreamNow(name=key, messages=state.messages, bytes=state.bytes, max_bytes=state.max_bytes)
            for key, state in now.streams.items()
        ],
    )  # fmt: skip


def curves(reading: Reading) -> Curves:
    log = reading.feed.source.log
    lineage = log.lineage
    runs = buckets([batch.point for batch in reading.line().batches if batch.point.rows], MOST_POINTS)
    numbers = [number for number in lineage.path() if number] if lineage.versions() else []
    entries = [log.version(number) for number in spread(numbers, MOST_POINTS)]
    acks = {entry.number: [one.at - entry.at for one in reading.convergence.of(entry.number)] for entry in entries}
    evals = _evals(reading)
    return Curves(
        depth=[mean([point.depth for point in run]) for run in runs], at=[run[-1].at for run in runs],
        reward=[mean([point.reward_mean for point in run]) for run in runs],
        reward_low=[min(point.reward_mean for point in run) for run in runs],
        reward_high=[max(point.reward_mean for point in run) for run in runs],
        staleness_mean=[
            sum(value * count for point in run for value, count in point.staleness.items())
            / max(sum(point.staleness.total() for point in run), 1)
            for run in runs
        ],
        staleness_max=[max((max(point.staleness, default=0) for point in run), default=0) for run in runs],
        tokens_mean=[sum(point.policy_tokens for point in run) / max(sum(point.rows for point in run), 1) for run in runs],
        eval_depth=[depth for depth, _ in evals], eval_mean=[value for _, value in evals],
        version_number=[entry.number for entry in entries], version_depth=[entry.depth for entry in entries],
        wire_bytes=[entry.wire_bytes for entry in entries], model_bytes=[entry.model_bytes for entry in entries],
        density=[entry.density for entry in entries], encode_seconds=[entry.encode_seconds for entry in entries],
        upload_seconds=[entry.upload_seconds for entry in entries], verify_seconds=[entry.verify_seconds for entry in entries],
        first_ack_seconds=[max(min(acks[entry.number]), 0.0) if acks[entry.number] else None for entry in entries],
        last_ack_seconds=[max(max(acks[entry.number]), 0.0) if acks[entry.number] else None for entry in entries],
        max_staleness=reading.feed.source.settings.buffer.max_staleness,
    )  # fmt: skip


def versions(reading: Reading, *, before: int | None, limit: int) -> Versions:
    """The newest first, those off the line too."""
    log = reading.feed.source.log
    lineage = log.lineage
    numbers = sorted((n for n in lineage.versions() if before is None or n < before), reverse=True)
    serving = Counter(ack.version for ack in reading.now.acks)
    evals = {one.version: one.mean for one in reading.decisions.evals.values()}
    rows = [_version(reading, number, serving, evals) for number in numbers[:limit]]
    return Versions(rows=rows, next=numbers[limit - 1] if len(numbers) > limit else None, replicas=len(reading.now.acks))


def replicas(reading: Reading) -> Replicas:
    """By name; those that have gone come last."""
    now = reading.now
    fleet = _fleet(reading)
    members = {member.replica: member for member in fleet.members}
    infos = {info.replica: info for info in now.replicas}
    acks = {ack.replica: ack for ack in now.acks}
    rows = []
    for name in sorted(infos) + sorted(set(acks) - set(infos)):
        info, ack, member = infos.get(name), acks.get(name), members.get(name)
        rows.append(
            ReplicaRow(
                replica=name, host=info.host if info else "", engine=info.engine if info else "",
                state=info.state if info else "gone", detail=info.detail if info else "",
                subscription=info.subscription if info else "", behind_seconds=member.behind_seconds if member else None,
                version=info.version if info else ack.version if ack else None, slots=info.slots if info else 0,
                busy=info.busy if info else 0, seen_at=info.at if info else None, mode=ack.mode if ack else None,
                ack_at=ack.at if ack else None, prepare_seconds=ack.prepare_seconds if ack else None,
                pause_seconds=ack.pause_seconds if ack else None, wire_bytes=ack.wire_bytes if ack else None,
                probe_max_abs_diff=ack.probe_max_abs_diff if ack else None, probe_tolerance=ack.probe_tolerance if ack else None,
                engine_digest=None if ack is None or ack.engine_digest is None
                else "equal" if ack.engine_digest == ack.files_digest else "differs",
                failed=dict(info.failed) if info else dict(ack.failed) if ack else {},
                history=[(one.version, max(one.at - one.published_at, 0.0)) for one in ack.history] if ack else [],
            )
        )  # fmt: skip
    return Replicas(rows=rows, latest=fleet.latest)


def _fleet(reading: Reading) -> Fleet:
    return fleet_of(reading.now.replicas, reading.now.acks, now=reading.now.at or time.time())


def _evals(reading: Reading) -> list[tuple[int, float]]:
    """(depth, mean) of the line's versions, by depth."""
    lineage = reading.feed.source.log.lineage
    known = set(lineage.versions())
    found: dict[int, float] = {}
    for one in reading.decisions.evals.values():
        if one.mean is not None and one.version in known and lineage.on_line(one.version):
            found.setdefault(one.depth, one.mean)
    return sorted(found.items())


def _version(reading: Reading, number: int, serving: Counter[int], evals: dict[int, float | None]) -> VersionRow:
    log = reading.feed.source.log
    lineage, entry = log.lineage, log.entry(number)
    now = {ack.replica: ack.version for ack in reading.now.acks}
    acks = [
        AckSeen(
            replica=one.replica, at=one.at, after_seconds=max(one.at - entry.at, 0.0), now=now.get(one.replica) == number,
            mode=one.mode, prepare_seconds=one.prepare_seconds, pause_seconds=one.pause_seconds,
            probe_max_abs_diff=one.probe_max_abs_diff, engine=one.engine,
        )
        for one in reading.convergence.of(number)
    ]  # fmt: skip
    own = entry if isinstance(entry, VersionEntry) else None
    base = entry if isinstance(entry, BaseEntry) else None
    return VersionRow(
        number=number, kind="version" if own else "base", depth=lineage.depth(number), epoch=lineage.epoch_of(number),
        base=lineage.parent(number), at=entry.at, on_line=lineage.on_line(number), quarantined=lineage.quarantined(number),
        representation=own.representation if own else "full", codec=own.codec if own else "",
        density=own.density if own else None, wire_bytes=own.wire_bytes if own else None,
        model_bytes=own.model_bytes if own else None, step=own.step if own else None,
        skipped=list(own.skipped) if own else [], missing_rows=own.missing_rows if own else 0,
        checkpoint=own.checkpoint if own else None, encode_seconds=own.encode_seconds if own else None,
        upload_seconds=own.upload_seconds if own else None, verify_seconds=own.verify_seconds if own else None,
        model_digest=own.model_digest if own else base.model_digest if base else "",
        folder=own.folder if own else base.anchor if base else "", eval_mean=evals.get(number), serving=serving[number],
        acks=acks,
    )  # fmt: skip
