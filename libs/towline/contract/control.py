"""CONTROL's records: the run's decisions, written by the buffer alone. docs/design/001-protocol.md, section 4, has the rules.

Each record names the writer that appended it and is one whole fact. Its place in the stream is its identity.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from towline.contract.codec import SCHEMA, decode
from towline.contract.task import Task


class ControlRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every record has."""

    schema: int = SCHEMA
    writer: str
    """The id of the writing process's incarnation, and a count that makes each record's bytes unique: `ID/N`."""


class WriterRecord(ControlRecord, frozen=True, kw_only=True, tag="writer"):
    """A buffer takes over: whoever wrote before is fenced."""

    at: float


class TaskRecord(ControlRecord, frozen=True, kw_only=True, tag="task"):
    """A sample is admitted."""

    task: Task
    requeues: int | msgspec.UnsetType = msgspec.UNSET
    """The dropped group whose prompt this group has again."""


class ReissueRecord(ControlRecord, frozen=True, kw_only=True, tag="reissue"):
    """The same sample again, whole. Supersedes the sample's earlier task."""

    task: Task
    reason: str


class BatchRow(msgspec.Struct, frozen=True, array_like=True):
    """A trajectory in a batch: its bytes are the ones at `sequence` of TRAJECTORY with this xxh3-128 digest."""

    group: int
    sample: int
    sequence: int
    digest: bytes
    reward: float
    least_depth: int
    """The least depth among the versions of its policy tokens, as the buffer judged it."""
    policy_tokens: int


class OverStaleRow(msgspec.Struct, frozen=True, array_like=True):
    """A row that holds tokens over the bound."""

    row: int
    """Its place among the record's rows."""
    tokens: int
    """Its policy tokens over the bound."""


class OverStale(msgspec.Struct, frozen=True, kw_only=True):
    """What the buffer decided about tokens over the bound: those whose version's depth is below for_depth - max_staleness."""

    mode: Literal["mask", "keep"]
    """mask: those tokens have no gradient. keep: their rows are trained whole, under the trainer's correction."""
    max_staleness: int
    """The bound that it judged by."""
    rows: tuple[OverStaleRow, ...]
    """Every row that has such tokens, in order."""


class BatchRecord(ControlRecord, frozen=True, kw_only=True, tag="batch"):
    """These rows train depth `for_depth` of the lineage of `epoch`."""

    epoch: int
    for_depth: int
    rows: tuple[BatchRow, ...]
    at: float
    over_stale: OverStale | msgspec.UnsetType = msgspec.UNSET
    """Where no row is over the bound there is none."""

    @property
    def within_bound(self) -> tuple[BatchRow, ...]:
        """The rows that hold no token over the bound: those whose staleness is the run's to bound."""
        if not isinstance(self.over_stale, OverStale):
            return self.rows
        over = {item.row for item in self.over_stale.rows}
        return tuple(row for place, row in enumerate(self.rows) if place not in over)


class DropRecord(ControlRecord, frozen=True, kw_only=True, tag="drop"):
    """A group's samples end here, all of them, for a named reason. Final, also across forks."""

    lane: str
    group: int
    samples: int
    reason: str
    requeue: bool | msgspec.UnsetType = msgspec.UNSET
    """Its prompt is admitted again, as a new group."""
    offered: int | msgspec.UnsetType = msgspec.UNSET
    """An external group that was never admitted: how many of its samples were scored. `samples` is 0 then."""


class RequeueRecord(ControlRecord, frozen=True, kw_only=True, tag="requeue"):
    """Somebody asked for it: the prompt of a group that was dropped is admitted again, as a new group. Once for a group."""

    dead: int
    """The dead letter that was named: its sequence in DEAD."""
    group: int
    """The dropped one; the new group's tasks name it in `requeues`."""
    task: Task
    """A task of the dropped group, whole."""


class CancelRecord(ControlRecord, frozen=True, kw_only=True, tag="cancel"):
    """The task at `task_sequence` needn't be generated any more (its group was dropped, re-issued or is stale)."""

    group: int
    sample: int
    task_sequence: int
    reason: str


class AdmitRecord(ControlRecord, frozen=True, kw_only=True, tag="admit"):
    """A sample from outside is taken in, once all of its group are scored; a group's records are one atomic batch."""

    lane: str
    group: int
    sample: int
    group_size: int


class EvalRow(msgspec.Struct, frozen=True, array_like=True):
    """An evaluated sample."""

    group: int
    sample: int
    sequence: int
    digest: bytes
    reward: float


class EvalRecord(ControlRecord, frozen=True, kw_only=True, tag="eval"):
    """An evaluation of `version` is closed; its samples are evaluated. `wanted` were asked for."""

    version: int
    depth: int
    wanted: int
    rows: tuple[EvalRow, ...]
    mean: float | None


class ForkRecord(ControlRecord, frozen=True, kw_only=True, tag="fork"):
    """The LOG's entry `epoch` opened at `base`, whose depth is `depth`: batches of older epochs for it or above are void."""

    epoch: int
    base: int
    depth: int


class SnapshotRecord(ControlRecord, frozen=True, kw_only=True, tag="snapshot"):
    """The state up to `covers` is in the blob; the tail begins after it."""

    blob: bytes
    covers: int
    outcome_cursor: int
    floor_depth: int | msgspec.UnsetType = msgspec.UNSET
    """Batches below this depth are final: no checkpoint is left to go back below it. The buffer forgets their groups."""


VERIFY_FAILED_ALL = "verify_failed_all"
"""An end's reason, and that of the drops before it: reward.max_failed_groups groups in a row couldn't be judged."""


class EndRecord(ControlRecord, frozen=True, kw_only=True, tag="end"):
    """The run is finished: nothing is admitted after it. `reason` is `steps`, `end_of_data` or a named stop."""

    reason: str
    depth: int


Record = (
    WriterRecord | TaskRecord | ReissueRecord | BatchRecord | DropRecord | RequeueRecord | CancelRecord | AdmitRecord | EvalRecord
    | ForkRecord | SnapshotRecord | EndRecord
)  # fmt: skip
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def decode_control(data: bytes) -> Record:
    """A CONTROL record; `MalformedError` otherwise."""
    return decode(_decoder, data, "control record")
