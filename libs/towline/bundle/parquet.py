"""A bundle as Parquet, for pandas, polars and DuckDB: parquet/trajectories, outcomes, tasks (the prompts) and batches.parquet.

`group` and `sample` join them; a batch's row names its trajectory by `trajectory_sequence` and `digest`. The frames stay the
truth; a message that can't be decoded stands in them alone. Needs pyarrow: pip install 'towline[parquet]'.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from towline.bundle.folder import stream_path
from towline.bundle.frames import StreamFile
from towline.bus.client import Message
from towline.bus.topology import CONTROL, OUTCOME, TRAJECTORY, StreamSpec
from towline.contract.codec import digest, plain
from towline.contract.control import BatchRecord, ForkRecord, ReissueRecord, TaskRecord, decode_control
from towline.contract.outcome import Score, decode_outcome
from towline.contract.trajectory import decode_trajectory
from towline.errors import MalformedError, UsageError

ROWS = 1024
"""Of a row group: what is in memory at a time."""


def write_parquet(folder: Path, run: str) -> None:
    """Write the tables of the bundle in `folder`; `UsageError` where pyarrow isn't installed."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError("--parquet needs pyarrow: pip install 'towline[parquet]'", code="extra_missing") from None

    spans = pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32()), ("version", pa.int64()), ("cut", pa.string())]))
    place = [("run", pa.string()), ("sequence", pa.int64()), ("at", pa.float64()), ("group", pa.int64()), ("sample", pa.int32())]
    trajectories = pa.schema(
        [
            *place, ("digest", pa.string()), ("lane", pa.string()), ("group_size", pa.int32()), ("task_sequence", pa.int64()),
            ("attempt", pa.int32()), ("prompt_source", pa.string()), ("prompt_epoch", pa.int64()), ("prompt_index", pa.int64()),
            ("reference_json", pa.string()), ("tokens", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8())),
            ("logprobs", pa.list_(pa.float32())), ("version_spans", spans), ("finish", pa.string()),
            ("temperature", pa.float64()), ("seed", pa.uint64()), ("engine", pa.string()), ("replica", pa.string()),
            ("pulled_at", pa.float64()), ("finished_at", pa.float64()), ("queue_seconds", pa.float64()),
            ("generate_seconds", pa.float64()),
        ]
    )  # fmt: skip
    outcomes = pa.schema(
        [
            *place, ("kind", pa.string()), ("lane", pa.string()), ("task_sequence", pa.int64()),
            ("trajectory_sequence", pa.int64()), ("reward", pa.float64()), ("components_json", pa.string()),
            ("verifier", pa.string()), ("policy_tokens", pa.int64()), ("total_tokens", pa.int64()), ("finish", pa.string()),
            ("delivery", pa.int64()), ("stage", pa.string()), ("final", pa.bool_()), ("reason", pa.string()),
            ("replica", pa.string()),
        ]
    )  # fmt: skip
    tasks = pa.schema(
        [
            *place, ("lane", pa.string()), ("group_size", pa.int32()), ("attempt", pa.int32()), ("reissued", pa.string()),
            ("prompt_source", pa.string()), ("prompt_epoch", pa.int64()), ("prompt_index", pa.int64()),
            ("prompt_tokens", pa.list_(pa.int32())), ("reference_json", pa.string()), ("environment", pa.string()),
            ("sampling_json", pa.string()), ("seed", pa.uint64()), ("not_before_depth", pa.int64()),
            ("exact_version", pa.int64()), ("admitted_at", pa.float64()),
        ]
    )  # fmt: skip
    batches = pa.schema(
        [
            *place, ("epoch", pa.int64()), ("for_depth", pa.int64()), ("trajectory_sequence", pa.int64()),
            ("digest", pa.string()), ("reward", pa.float64()), ("least_depth", pa.int64()),
            ("policy_tokens", pa.int64()), ("void_by", pa.int64()),
        ]
    )  # fmt: skip
    (folder / "parquet").mkdir()
    forks = _forks(folder)
    tables: tuple[tuple[str, StreamSpec, Any, Callable[[Message], Iterable[dict[str, Any]]]], ...] = (
        ("trajectories", TRAJECTORY, trajectories, lambda message: [_trajectory(message)]),
        ("outcomes", OUTCOME, outcomes, lambda message: [_outcome(message)]),
        ("tasks", CONTROL, tasks, _tasks),
        ("batches", CONTROL, batches, lambda message: _batches(message, forks)),
    )
    for name, spec, schema, row in tables:
        with pq.ParquetWriter(folder / "parquet" / f"{name}.parquet", schema, compression="zstd") as writer:
            rows = _rows(folder, spec, run, row)
            while group := list(itertools.islice(rows, ROWS)):
                writer.write_table(pa.Table.from_pylist(group, schema=schema))


def _rows(
    folder: Path, spec: StreamSpec, run: str, rows: Callable[[Message], Iterable[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    for message in StreamFile(stream_path(folder, spec)).messages():
        try:
            found = list(rows(message))
        except MalformedError:
            continue
        for row in found:
            yield {"run": run, "sequence": message.sequence, "at": message.at, **row}


def _forks(folder: Path) -> list[tuple[int, ForkRecord]]:
    """(sequence, record) of each fork."""
    found = []
    for message in StreamFile(stream_path(folder, CONTROL)).messages():
        record = decode_control(message.data)
        if isinstance(record, ForkRecord):
            found.append((message.sequence, record))
    return found


def _tasks(message: Message) -> Iterator[dict[str, Any]]:
    """One row for an admission or an issue again, none for another record."""
    record = decode_control(message.data)
    if not isinstance(record, TaskRecord | ReissueRecord):
        return
    t = record.task
    yield {
        "group": t.group, "sample": t.sample, "lane": t.lane, "group_size": t.group_size, "attempt": t.attempt,
        "reissued": record.reason if isinstance(record, ReissueRecord) else None, "prompt_source": t.prompt_ref.source,
        "prompt_epoch": t.prompt_ref.epoch, "prompt_index": t.prompt_ref.index, "prompt_tokens": t.prompt_tokens,
        "reference_json": json.dumps(t.reference, default=str), "environment": t.environment,
        "sampling_json": json.dumps(plain(t.sampling)), "seed": t.seed, "not_before_depth": t.not_before_depth,
        "exact_version": t.exact_version, "admitted_at": t.admitted_at,
    }  # fmt: skip


def _batches(message: Message, forks: Sequence[tuple[int, ForkRecord]]) -> Iterator[dict[str, Any]]:
    """One for each row of a batch. `void_by` is the epoch whose fork took the batch out of force."""
    record = decode_control(message.data)
    if not isinstance(record, BatchRecord):
        return
    void = next(
        (f.epoch for at, f in forks if at > message.sequence and record.for_depth >= f.depth and record.epoch != f.epoch), None
    )
    for row in record.rows:
        yield {
            "group": row.group, "sample": row.sample, "epoch": record.epoch, "for_depth": record.for_depth,
            "trajectory_sequence": row.sequence, "digest": row.digest.hex(), "reward": row.reward,
            "least_depth": row.least_depth, "policy_tokens": row.policy_tokens, "void_by": void,
        }  # fmt: skip


def _trajectory(message: Message) -> dict[str, Any]:
    t = decode_trajectory(message.data)
    return {
        "digest": digest(message.data).hex(), "group": t.group, "sample": t.sample, "lane": t.lane, "group_size": t.group_size,
        "task_sequence": t.task_sequence, "attempt": t.attempt, "prompt_source": t.prompt_ref.source,
        "prompt_epoch": t.prompt_ref.epoch, "prompt_index": t.prompt_ref.index,
        "reference_json": json.dumps(t.reference, default=str), "tokens": t.tokens, "loss_mask": t.loss_mask,
        "logprobs": t.logprobs,
        "version_spans": [{"start": s.start, "end": s.end, "version": s.version, "cut": s.cut} for s in t.version_spans],
        "finish": t.finish, "temperature": t.sampling.temperature, "seed": t.seed, "engine": t.engine, "replica": t.replica,
        "pulled_at": t.timings.pulled_at, "finished_at": t.timings.finished_at, "queue_seconds": t.timings.queue_seconds,
        "generate_seconds": t.timings.generate_seconds,
    }  # fmt: skip


def _outcome(message: Message) -> dict[str, Any]:
    o = decode_outcome(message.data)
    common = {"group": o.group, "sample": o.sample, "lane": o.lane, "task_sequence": o.task_sequence}
    if isinstance(o, Score):
        return {
            **common, "kind": "score", "trajectory_sequence": o.trajectory_sequence, "reward": o.reward,
            "components_json": json.dumps(o.components), "verifier": o.verifier, "policy_tokens": o.policy_tokens,
            "total_tokens": o.total_tokens, "finish": o.finish,
        }  # fmt: skip
    return {
        **common, "kind": "failure", "delivery": o.delivery, "stage": o.stage, "final": o.final, "reason": o.reason,
        "replica": o.replica,
    }  # fmt: skip
