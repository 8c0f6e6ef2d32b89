"""Finds all that a run recorded of one sample, and says what became of it and why."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from towline.bundle.source import Source
from towline.bus.client import Message
from towline.bus.topology import CONTROL, DEAD, OUTCOME, TRAJECTORY
from towline.contract.codec import digest
from towline.contract.groups import group_token
from towline.contract.outcome import Score, decode_outcome
from towline.contract.trajectory import Trajectory, decode_trajectory
from towline.errors import MalformedError, MissingError
from towline.store.lineage import Lineage
from towline.trace.decided import read_decided
from towline.trace.explain import explain
from towline.trace.life import (
    FailureSeen,
    Generated,
    Life,
    Scored,
    SegmentSeen,
    Serving,
    SpanSeen,
    TokenSeen,
    VersionSeen,
)
from towline.verifiers.tokenizer import Tokenizer


async def trace(source: Source, group: int, sample: int, tokenizer: Tokenizer | None = None) -> Life:
    """The life of GROUP.SAMPLE. `MissingError` where the run knows no such sample.

    tokenizer: decodes the tokens for people; token IDs are there in any case.
    """
    life = Life(run=source.settings.run.name, group=group, sample=sample)
    life.control_begins = max((await source.state(CONTROL)).first, 1)
    message = await source.last(TRAJECTORY, source.topology.trajectory(group, sample))
    stored = None if message is None else digest(message.data)
    found = None if message is None else await asyncio.to_thread(_decoded, life, message)
    await read_decided(source, life, stored, 0 if found is None else found.task_sequence)
    if found is not None and message is not None:
        await asyncio.to_thread(_trajectory, life, message, found, source.log.lineage, tokenizer)
    await _outcomes(source, life, stored)
    await _dead(source, life)
    if not life.attempts and not life.batches and message is None:
        purged = "" if life.control_begins == 1 else f" since CONTROL {life.control_begins}, what was before is purged"
        raise MissingError(
            f"{source.where} knows no sample {life.name}{purged}; see `towline trajectories list`", code="sample_missing"
        )
    _version(source, life)
    life.replicas = await _replicas(source, life)
    life.fate, life.explanation = explain(life, source.settings)
    return life


def _decoded(life: Life, message: Message) -> Trajectory | None:
    try:
        return decode_trajectory(message.data)
    except MalformedError as error:
        life.malformed = error.message
        return None


def _trajectory(life: Life, message: Message, found: Trajectory, lineage: Lineage, tokenizer: Tokenizer | None) -> None:
    life.lane, life.group_size = found.lane, found.group_size
    if life.prompt is None:  # a sample from outside
        ref = found.prompt_ref
        life.prompt = {"source": ref.source, "epoch": ref.epoch, "index": ref.index, "reference": found.reference}
    known = set(lineage.versions())
    start = int(found.loss_mask.argmax())
    life.trajectory = Generated(
        sequence=message.sequence,
        digest=digest(message.data).hex(),
        at=message.at,
        pulled_at=found.timings.pulled_at,
        finished_at=found.timings.finished_at,
        queue_seconds=found.timings.queue_seconds,
        generate_seconds=found.timings.generate_seconds,
        replica=found.replica,
        engine=found.engine,
        attempt=found.attempt,
        task_sequence=found.task_sequence,
        finish=found.finish,
        seed=found.seed,
        temperature=found.sampling.temperature,
        policy_tokens=found.policy_tokens,
        spans=tuple(
            SpanSeen(
                start=span.start,
                end=span.end,
                version=span.version,
                cut=span.cut,
                depth=lineage.depth(span.version) if span.version in known else None,
                on_line=span.version in known and lineage.on_line(span.version),
            )
            for span in found.version_spans
        ),
        segments=tuple(SegmentSeen(start=one.start, end=one.end, kind=one.kind) for one in found.segments),
        tokens=_tokens(found, tokenizer),
        prompt_text=None if tokenizer is None else tokenizer.decode(found.tokens[:start].tolist(), skip_special_tokens=False),
        response_text=None if tokenizer is None else tokenizer.decode(found.tokens[start:].tolist(), skip_special_tokens=False),
    )


def _tokens(trajectory: Trajectory, tokenizer: Tokenizer | None) -> tuple[TokenSeen, ...]:
    versions = {position: span.version for span in trajectory.version_spans for position in range(span.start, span.end)}
    return tuple(
        TokenSeen(
            id=int(token),
            text=None if tokenizer is None else tokenizer.decode([int(token)], skip_special_tokens=False),
            logprob=float(trajectory.logprobs[position]) if position in versions else None,
            version=versions.get(position),
        )
        for position, token in enumerate(trajectory.tokens)
    )


async def _outcomes(source: Source, life: Life, stored: bytes | None) -> None:
    topology = source.topology
    subjects = [topology.subject(f"outcome.score.{group_token(life.group)}.*"), topology.failure(life.group, life.sample)]
    async with contextlib.aclosing(source.read(OUTCOME, subjects=subjects)) as messages:
        async for message in messages:
            outcome = decode_outcome(message.data)
            if not isinstance(outcome, Score):
                life.failures.append(
                    FailureSeen(
                        at=message.at, task_sequence=outcome.task_sequence, delivery=outcome.delivery, stage=outcome.stage,
                        final=outcome.final, reason=outcome.reason, replica=outcome.replica,
                    )
                )  # fmt: skip
                continue
            life.group_rewards[outcome.sample] = outcome.reward
            if outcome.sample == life.sample:
                life.score = Scored(
                    at=message.at,
                    reward=outcome.reward,
                    components=outcome.components,
                    verifier=outcome.verifier,
                    same_bytes=outcome.trajectory_digest == stored,
                )


async def _dead(source: Source, life: Life) -> None:
    """The letters about its trajectory, which reward alone writes: just before its final failure, or as it couldn't be read.
    So DEAD isn't looked at for samples that have neither."""
    if not (life.malformed or any(failure.final for failure in life.failures)):
        return
    mine = source.topology.trajectory(life.group, life.sample)
    async with contextlib.aclosing(source.read(DEAD, subjects=[source.topology.dead("reward")])) as messages:
        async for message in messages:
            if _context(message).get("subject") == mine:
                life.dead.append(message.headers.get("Towline-Reason", ""))


def _context(message: Message) -> dict[str, Any]:
    try:
        found = json.loads(message.headers.get("Towline-Context", "{}"))
    except ValueError:  # cut off at the length that a header may have
        return {}
    return found if isinstance(found, dict) else {}


def _version(source: Source, life: Life) -> None:
    """The version that the standing batch went into, if it's committed: the line's first of at least the next depth."""
    batch, lineage = life.batch, source.log.lineage
    if batch is None:
        return
    number = lineage.version_reaching(batch.for_depth + 1)
    if number is None or lineage.epoch_of(number) != batch.epoch:
        return
    entry = source.log.version(number)
    life.version = VersionSeen(
        number=number,
        depth=entry.depth,
        at=entry.at,
        skipped=batch.for_depth in entry.skipped,
        missing_rows=entry.missing_rows,
        on_line=lineage.on_line(number),
    )


async def _replicas(source: Source, life: Life) -> list[Serving]:
    if life.version is None:
        return []
    lineage, number = source.log.lineage, life.version.number
    known = set(lineage.versions())
    found = []
    for ack in await source.acks():
        if ack.version == number:
            relation = "serves it"
        elif ack.version not in known or not lineage.on_line(ack.version):
            relation = "off the line"
        else:
            relation = "serves a later one" if lineage.is_ancestor(number, ack.version) else "not there yet"
        found.append(
            Serving(
                replica=ack.replica, version=ack.version, at=ack.at, relation=relation,  # type: ignore[arg-type]
                probe_max_abs_diff=ack.probe_max_abs_diff,
            )
        )  # fmt: skip
    return found
