"""Makes a version's copy on this host: beside those that are there, or in place where the budget has room for one.

Beside: a copy of the nearest one gets the deltas, or another start is downloaded; it has a name once every digest agrees. In
place: the deltas are applied to the one copy, each block's old values in the undo journal first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from towline import faults
from towline.contract.entries import VersionEntry
from towline.delta.applier import apply_parts
from towline.delta.files import read_safetensors, write_safetensors
from towline.delta.state import ModelState, model_digest
from towline.errors import CorruptError, FullError, MissingError, TowlineError, UnavailableError, UsageError
from towline.replica.host import (
    SCRATCH_SUFFIX,
    SUFFIX,
    UNDO_SUFFIX,
    Copy,
    HostBusyError,
    HostCopies,
    map_writable,
    version_entry,
)
from towline.replica.host_record import CopyRecord, Undo, lock
from towline.replica.journal import UndoJournal
from towline.store.log import Log
from towline.store.materialize import entry_manifest, materialize
from towline.store.objects import ObjectStore
from towline.store.transfer import fetch_all

_UNBUDGETED_COPIES = 2
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A version's copy and what it took to get it. `changed`: the tensors that differ from version `changed_from`'s, where
    making it in place has told."""

    copy: Copy
    prepare_seconds: float
    wire_bytes: int
    changed: set[str] | None = None
    changed_from: int | None = None
    in_place: bool = False
    """The copy changes under its readers once they have released it."""


@dataclass(frozen=True, slots=True)
class _Made:
    record: CopyRecord
    wire_bytes: int
    changed: set[str] | None = None
    changed_from: int | None = None


class CopyMaker:
    """Takes copies from the host, and makes those that aren't there. `keeps`: the engine reads its last copy again (to
    restart), so a copy must not change under it and the budget has to hold two."""

    def __init__(self, host: HostCopies, objects: ObjectStore, *, budget_bytes: int, threads: int, keeps: bool) -> None:
        self._host, self._objects = host, objects
        self._budget_bytes, self._threads, self._keeps = budget_bytes, threads, keeps

    def take(self, log: Log, version: int) -> Taken:
        """Blocks. `HostBusyError` where another replica must be waited for; `UsageError` for a budget without room;
        `CorruptError`, `MissingError`, `UnavailableError` as `materialize`, with what was there before still good."""
        began = time.perf_counter()
        made: _Made | None = None
        copy = self._host.open(log, version)
        if copy is None:
            try:
                with self._host.preparing():
                    copy = self._host.open(log, version)
                    if copy is None:
                        made = self._make(log, version)
                        copy = self._host.open(log, version)
            except OSError as error:
                raise FullError(f"{self._host.folder}: version {version} can't be written: {error}") from error
        if copy is None:
            raise CorruptError(f"{self._host.folder}: version {version} changed after it was made", code="host_copy")
        return Taken(
            copy=copy,
            prepare_seconds=time.perf_counter() - began,
            wire_bytes=made.wire_bytes if made else 0,
            changed=made.changed if made else None,
            changed_from=made.changed_from if made else None,
            in_place=self._room(log) == 1,
        )

    def _make(self, log: Log, version: int) -> _Made:
        room = self._room(log)
        if room == 1 and (copies := self._host.record().copies):
            made = self._in_place(log, version, copies[0])
            if made is not None:
                return made
        return self._beside(log, version, room)

    def _room(self, log: Log) -> int | None:
        """How many copies the budget holds; None without a budget, or while nobody here knows the model's size."""
        size = self._size(log)
        if not self._budget_bytes or not size:
            return None
        room = self._budget_bytes // size
        if room < 1 + self._keeps:
            what = "no copy" if not room else "one copy, and this engine needs a second one to restart from,"
            raise UsageError(
                f"rollout.copy_budget_bytes = {self._budget_bytes} holds {what} of a model of {size} bytes; "
                f"set it to {size * (1 + self._keeps)} or more, or to 0",
                code="copy_budget",
            )
        return room

    def _size(self, log: Log) -> int:
        """Bytes of weights in a copy: as a version's entry says, or measured on a copy; 0 where there is neither."""
        latest = version_entry(log, log.lineage.latest)
        if isinstance(latest, VersionEntry):
            return latest.model_bytes
        for copy in self._host.record().copies:
            with contextlib.suppress(MissingError, CorruptError):
                return sum(tensor.spec.nbytes for tensor in read_safetensors(self._host.path(copy)).values())
        return 0

    # Beside

    def _beside(self, log: Log, version: int, room: int | None) -> _Made:
        entry, host = version_entry(log, version), self._host
        base = self._nearest(log, version)
        self._clear(version, room, keep=base)
        faults.point("replica.copy_begun")
        scratch = host.folder / f"{os.getpid()}{SCRATCH_SUFFIX}"
        have: tuple[int, ModelState] | None = None
        if base is not None and (room is None or room > 1):
            shutil.copyfile(host.path(base), scratch)
            have = (base.version, map_writable(scratch))
            faults.point("replica.copy_partly")
        state = materialize(self._objects, log, version, have, in_place=True, threads=self._threads)
        if have is None or state is not have[1]:
            write_safetensors(state, scratch, {"format": "pt"})
            faults.point("replica.copy_partly")
        # The version that was applied was verified where it lies; what was written from memory is read back once.
        faults.point("replica.copy_written")
        record = CopyRecord(file=f"v{version:08d}{SUFFIX}", version=version, digest=entry.model_digest)
        os.replace(scratch, host.path(record))
        host.write(host.record().having(record))
        if have is not None and state is have[1]:
            host.trust(record)
        faults.point("replica.copy_recorded")
        return _Made(record, _wire_bytes(log, version, have[0] if have else None))

    def _nearest(self, log: Log, version: int) -> CopyRecord | None:
        """The copy from which the fewest batches lead to the version."""
        lineage = log.lineage
        ancestors = [
            copy
            for copy in self._host.record().copies
            if copy.state == "good" and copy.version in lineage and lineage.is_ancestor(copy.version, version)
        ]
        return max(ancestors, key=lambda copy: lineage.depth(copy.version), default=None)

    def _clear(self, version: int, room: int | None, keep: CopyRecord | None) -> None:
        """Delete copies that nobody uses until one more fits."""
        most = _UNBUDGETED_COPIES if room is None else room
        if room == 1:
            keep = None
        for copy in self._host.record().copies:
            if len(self._host.record().copies) < most:
                return
            if copy != keep:
                self._host.drop(copy)
        left = len(self._host.record().copies)
        if room is not None and left >= room:
            raise HostBusyError(
                f"{self._host.folder}: no room for version {version}: {left} copies are in use, rollout.copy_budget_bytes holds "
                f"{room}",
                code="copy_room",
            )

    # In place

    def _in_place(self, log: Log, version: int, copy: CopyRecord) -> _Made | None:
        """None where the version can't be reached from the copy, which nobody uses then."""
        host, lineage = self._host, log.lineage
        path = host.path(copy)
        handle = lock(path, shared=False)
        if handle is None:
            raise HostBusyError(f"{path}: other replicas of this host are still reading version {copy.version}", code="host_busy")
        try:
            if not (copy.version in lineage and lineage.is_ancestor(copy.version, version)):
                undo = copy.undo
                if undo is None or undo.version not in lineage or not lineage.is_ancestor(undo.version, version):
                    return None
                back = host.put_back(copy)
                if back is None:
                    return None
                copy = back
            if copy.version == version:
                return _Made(copy, 0)
            try:
                return self._apply(log, version, copy)
            except (CorruptError, MissingError) as error:
                # The chain leads nowhere; another start may.
                failure = error
            if not path.exists():
                return None
            state = self._elsewhere(log, version, failure)
            record = CopyRecord(file=copy.file, version=version, digest=version_entry(log, version).model_digest)
            return self._rewrite(state, record, path)
        finally:
            os.close(handle)

    def _apply(self, log: Log, version: int, copy: CopyRecord) -> _Made:
        """The chain from the copy's version, journalled. After an error the copy is what it was."""
        host, entry, path = self._host, version_entry(log, version), self._host.path(copy)
        undo = Undo(file=f"{path.stem}-{copy.version}-{version}{UNDO_SUFFIX}", version=copy.version, digest=copy.digest)
        journal = UndoJournal(host.folder / undo.file)
        record = CopyRecord(file=copy.file, version=version, digest=entry.model_digest, state="changing", undo=undo)
        host.write(host.record().having(record))
        faults.point("replica.copy_begun")
        wire_bytes = 0
        try:
            state = map_writable(path)
            for number in log.lineage.chain(version, copy.version):
                step = log.version(number)
                manifest = entry_manifest(self._objects, step)
                if manifest.representation == "full":
                    raise MissingError(f"run {log.run}: version {number} is a full one", code="no_chain")
                parts = (data for _, data in fetch_all(self._objects, manifest.folder, manifest.parts))
                report = apply_parts(
                    state, parts, layout=manifest.layout(), digests=manifest.digests(), threads=self._threads,
                    backend_name=None, journal=journal,
                )  # fmt: skip
                wire_bytes += step.wire_bytes
                if manifest.layout_digest != step.layout_digest or model_digest(report.digests) != step.model_digest:
                    raise CorruptError(f"run {log.run}: the state isn't version {number}: its digest is another",
                                       code="model_digest")  # fmt: skip
                faults.point("replica.copy_partly")
        except TowlineError:
            journal.close()
            host.put_back(record)
            raise
        journal.close()
        faults.point("replica.copy_written")
        good = CopyRecord(file=copy.file, version=version, digest=entry.model_digest, undo=undo)
        host.write(host.record().having(good))
        host.trust(good)
        if copy.undo is not None:
            (host.folder / copy.undo.file).unlink(missing_ok=True)
        faults.point("replica.copy_recorded")
        return _Made(good, wire_bytes, journal.names, copy.version)

    def _elsewhere(self, log: Log, version: int, failure: CorruptError | MissingError) -> ModelState:
        """In memory, from another start than the copy."""
        try:
            return materialize(self._objects, log, version, None, threads=self._threads)
        except (CorruptError, MissingError, UnavailableError):
            raise failure from None

    def _rewrite(self, state: ModelState, record: CopyRecord, path: Path) -> _Made:
        """Every byte anew. A crash meanwhile leaves a record that says so, and nothing to put back."""
        host = self._host
        host.write(host.record().having(CopyRecord(file=record.file, version=record.version, digest=record.digest,
                                                   state="changing")))  # fmt: skip
        live = map_writable(path)
        for name, tensor in state.items():
            np.copyto(live[name].data, tensor.data)
        host.write(host.record().having(record))
        return _Made(record, sum(tensor.spec.nbytes for tensor in state.values()))


def _wire_bytes(log: Log, version: int, have: int | None) -> int:
    """What the version's chain from the copy weighs; from entry 0 where there was none."""
    frm = have if have is not None else 0
    return sum(log.version(number).wire_bytes for number in log.lineage.chain(version, frm))
