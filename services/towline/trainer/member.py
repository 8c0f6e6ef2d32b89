"""One rank's part in everything that the trainer's ranks do together. Alone it does all of it.

Each method is called on every rank, in the same order on its channel, and raises the same `TowlineError` on all: so rank 0 may
decide what comes next.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from towline.config import Settings
from towline.contract.control import BatchRecord
from towline.delta.state import ModelState
from towline.errors import CorruptError, InvariantError, MissingError, TowlineError, UsageError
from towline.learner.base import Learner, StepReport, pack_rows
from towline.learner.registry import BACKENDS, look_up
from towline.learner.rows import Gap, Gathered
from towline.learner.sharing import Share, divide
from towline.learner.world import World
from towline.store import checkpoints, keys, versions
from towline.store.log import Log
from towline.store.manifest import FileRecord, Manifest, TensorRecord
from towline.store.objects import ObjectStore
from towline.trainer.rows import ELSEWHERE, Gatherer

T = TypeVar("T")


class _Part(msgspec.Struct, array_like=True):
    """What the leader of a part of the rows tells the other ranks of them."""

    rows: list[tuple[int, float, int]]
    """(number in the record, advantage, policy tokens) of each row at hand"""
    gaps: list[tuple[int, str, str]]
    """(number in the record, reason, message)"""
    masked_rows: int
    masked_tokens: int
    kept_tokens: int


@dataclass(slots=True)
class Snapshotted:
    """A rank's part of a snapshot."""

    state: ModelState
    checkpoint: dict[str, bytes] | None
    logprobs: tuple[float, ...]
    """Of the probe, on every rank the same."""
    seconds: float
    """Training stood still for it."""


class Member:
    """A rank of `worlds`: one `World` for each channel."""

    def __init__(self, settings: Settings, objects: ObjectStore, worlds: dict[str, World]) -> None:
        self.settings = settings
        self._objects = objects
        self._run = settings.run.name
        self._rows, self._work, self._stage = (worlds[name] for name in ("rows", "work", "stage"))
        self._learner: Learner | None = None
        self._batches: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._outlined: ModelState | None = None
        self._snapshot: Snapshotted | None = None
        self._baseline: ModelState | None = None
        self._uploaded: ModelState | None = None

    @property
    def learner(self) -> Learner:
        if self._learner is None:
            raise InvariantError("the learner isn't made yet", code="command")
        return self._learner

    @property
    def rank(self) -> int:
        return self._work.rank

    def make(self, log: Log, folder: Path) -> None:
        """Each machine's first rank fetches the base model."""
        with self._work.together():
            log.refresh()
            if os.environ.get("LOCAL_RANK", "0") == "0":
                versions.fetch_base_folder(self._objects, log, folder)
        backend: Any = look_up("trainer.backend", BACKENDS, self.settings.trainer.backend)
        arguments = (folder, self.settings, self.settings.run.seed)
        error: TowlineError | None = None
        try:
            self._learner = backend(*arguments) if self._work.size == 1 else backend(*arguments, self._work)
        except UsageError as raised:  # of settings or model: every rank finds the same
            error = raised
        self._work.agree(error)

    def restore(self, checkpoint: str) -> checkpoints.CheckpointMeta:
        """`CorruptError` or `MissingError` where it can't be used: another one may be tried."""
        with self._work.together():
            files, meta = checkpoints.open_files(self._objects, self._run, checkpoint)
        error: TowlineError | None = None
        try:
            self.learner.restore(files)
        except (CorruptError, MissingError) as raised:
            error = raised
        self._work.agree(error)
        return meta

    def outline(self) -> list[TensorRecord]:
        """The learner's tensors: on rank 0 all of them, elsewhere this rank's."""
        state = self._outlined = self.learner.state()
        records = [TensorRecord(name, raw.spec.dtype, raw.spec.shape, raw.digest()) for name, raw in sorted(state.items())]
        found = _gathered(self._work, records, list[TensorRecord])
        return [record for part in found for record in part]

    def adopt(self) -> None:
        self._baseline, self._outlined = self._outlined, None

    def agreed(self, error: TowlineError) -> bool:
        """Whether every rank met this error at the same call, so that they may go on together."""
        return any(world.agreed is error for world in (self._rows, self._work, self._stage))

    async def gather(self, gatherer: Gatherer, record: BatchRecord, entries: int) -> Gathered:
        """The batch's rows: fetched by one rank of each part, given to those with the same part, and known to all.

        On rank 0 the gaps and counts are those of all parts. `InvariantError` where a row is staler than the run allows;
        `UnavailableError` where the bus is away: nothing is kept then, and the same record may be gathered again.
        """
        place = self.learner.place
        mine = divide([row.policy_tokens for row in record.rows], place.count)[place.index]
        payloads: list[bytes | str] = []
        error: TowlineError | None = None
        try:
            await gatherer.know(entries)
            if place.leads:
                payloads = await gatherer.payloads([record.rows[row] for row in mine])
        except TowlineError as raised:
            error = raised
        await asyncio.to_thread(self._rows.agree, error)
        if place.peers.size > 1:
            packed = await asyncio.to_thread(place.peers.broadcast, _pack(payloads) if place.leads else None)
            payloads = _unpack(packed)
        found: list[bytes | str] = [ELSEWHERE] * len(record.rows)
        for row, payload in zip(mine, payloads, strict=True):
            found[row] = payload
        gathered, error = None, None
        try:
            gathered = await gatherer.assemble(record, found)
        except TowlineError as raised:
            error = raised
        await asyncio.to_thread(self._rows.agree, error)
        assert gathered is not None
        return await asyncio.to_thread(self._share, record, gathered)

    def train(self, for_depth: int) -> StepReport:
        with self._lock:
            batch = self._batches.pop(for_depth, None)
        if batch is None:
            raise InvariantError(f"no batch was gathered for depth {for_depth}", code="command")
        return self.learner.train(batch)

    def snapshot(self, checkpoint: bool, probe: tuple[int, ...]) -> Snapshotted:
        """Between steps: nothing else touches the learner meanwhile."""
        began = time.monotonic()
        state = self.learner.state()
        logprobs = tuple(self.learner.logprobs(probe, state)) if probe else ()
        files = self.learner.checkpoint() if checkpoint else None
        self._snapshot = found = Snapshotted(state, files, logprobs, time.monotonic() - began)
        self._work.barrier()  # whoever goes on to stage it finds it on every rank
        return found

    def save(self, name: str) -> list[FileRecord]:
        """Upload this rank's checkpoint files; on rank 0 every rank's records."""
        files = self._taken().checkpoint
        if files is None:
            raise InvariantError("the snapshot has no checkpoint", code="command")
        records: list[FileRecord] = []
        with self._stage.together():
            records = checkpoints.save_files(self._objects, self._run, name, files)
        return [record for part in _gathered(self._stage, records, list[FileRecord]) for record in part]

    def upload(self, epoch: int, base: int, write_id: str, facts: versions.VersionFacts) -> Manifest | None:
        """Encode and upload this rank's tensors; rank 0 then writes the manifest."""
        settings, state, baseline = self.settings, self._taken().state, self._baseline
        if baseline is None:
            raise InvariantError("no base was adopted", code="command")
        alone = self._stage.size == 1
        shards: list[versions.Shard] = []
        with self._stage.together():
            shards = [
                versions.write_shard(
                    self._objects, keys.version_folder(self._run, epoch, base, write_id), None if alone else self.rank,
                    base_state=baseline, new_state=state, mode=settings.trainer.delta_mode,
                    prove=settings.publisher.verify == "sender", threads=settings.trainer.threads,
                )
            ]  # fmt: skip
        shards = _gathered(self._stage, shards[0], versions.Shard)
        manifest = None
        with self._stage.together():
            if self.rank == 0:
                manifest = versions.write_manifest(
                    self._objects, self._run, epoch=epoch, base=base, write_id=write_id, shards=shards, facts=facts,
                    mode=settings.trainer.delta_mode,
                )  # fmt: skip
        self._uploaded = state
        return manifest

    def advance(self) -> None:
        self._baseline, self._uploaded, self._snapshot = self._uploaded, None, None

    def _taken(self) -> Snapshotted:
        if self._snapshot is None:
            raise InvariantError("no snapshot was taken", code="command")
        return self._snapshot

    def _share(self, record: BatchRecord, gathered: Gathered) -> Gathered:
        """Tell the others what this part has, learn the same of theirs, and keep this rank's batch."""
        if self._rows.size == 1:
            self._keep(record.for_depth, pack_rows(record.for_depth, gathered.rows))
            return gathered
        numbers = {(row.group, row.sample): number for number, row in enumerate(record.rows)}
        own = _Part(
            rows=[
                (numbers[row.group, row.sample], float(row.advantage), int(row.loss_mask.sum(dtype=np.int64)))
                for row in gathered.rows
            ],
            gaps=[(numbers[gap.row.group, gap.row.sample], gap.reason, gap.message) for gap in gathered.gaps],
            masked_rows=gathered.masked_rows,
            masked_tokens=gathered.masked_tokens,
            kept_tokens=gathered.kept_tokens,
        )
        told = msgspec.msgpack.encode(own) if self.learner.place.leads else b""
        parts = [msgspec.msgpack.decode(part, type=_Part) for part in self._rows.all_gather(told) if part]
        known = sorted(row for part in parts for row in part.rows)
        places = {row[0]: place for place, row in enumerate(known)}
        share = None
        if self.learner.place.count > 1:
            share = Share(
                mine=np.array([places[row[0]] for row in own.rows], np.int64),
                advantages=np.array([row[1] for row in known], np.float32),
                policy_tokens=np.array([row[2] for row in known], np.int64),
            )
        self._keep(record.for_depth, pack_rows(record.for_depth, gathered.rows, share))
        gaps = sorted(gap for part in parts for gap in part.gaps)
        whole = Gathered(
            rows=gathered.rows,
            gaps=[Gap(record.rows[number], reason, message) for number, reason, message in gaps],
            reward_mean=gathered.reward_mean,
            masked_rows=sum(part.masked_rows for part in parts),
            masked_tokens=sum(part.masked_tokens for part in parts),
            kept_tokens=sum(part.kept_tokens for part in parts),
        )
        self._rows.barrier()  # whoever goes on to train finds the batch on every rank
        return whole

    def _keep(self, for_depth: int, batch: Any) -> None:
        with self._lock:
            self._batches[for_depth] = batch


def _pack(payloads: list[bytes | str]) -> bytes:
    """Each row's (bytes, reason why there are none)."""
    pairs = [(payload, "") if isinstance(payload, bytes) else (b"", payload) for payload in payloads]
    return msgspec.msgpack.encode(pairs)


def _unpack(packed: bytes) -> list[bytes | str]:
    return [reason or payload for payload, reason in msgspec.msgpack.decode(packed, type=list[tuple[bytes, str]])]


def _gathered(world: World, own: T, kind: Any) -> list[T]:
    """Every rank's, on rank 0; elsewhere this rank's alone."""
    if world.size == 1:
        return [own]
    found = world.gather(msgspec.msgpack.encode(own))
    return [own] if found is None else [msgspec.msgpack.decode(part, type=kind) for part in found]
