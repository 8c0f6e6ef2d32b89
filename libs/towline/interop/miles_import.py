"""A miles/slime folder's versions brought into a run, each verified and committed as a version of an epoch of the importer's own.

The importer is the run's trainer and publisher in one: it opens an epoch at its start, which fences an older importer, and
never touches a run that has a real trainer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from towline.contract.entries import OpenEntry, VersionEntry
from towline.delta.state import ModelState, model_digest, tensor_digests
from towline.errors import ConflictError, CorruptError, UsageError
from towline.interop.miles_layout import Index, folder_of, published, read_index, read_version, unsettled
from towline.store import keys
from towline.store.base import seed_base
from towline.store.commit import BroughtEpoch
from towline.store.log import Log
from towline.store.manifest import VersionFacts
from towline.store.materialize import materialize
from towline.store.objects import ObjectStore
from towline.store.versions import write_version

_PREFIX = "miles-"
_log = structlog.get_logger("towline.bridge")


@dataclass(frozen=True, slots=True)
class Brought:
    """A version that was committed."""

    miles_version: int
    version: int
    wire_bytes: int


class Importer:
    """Synchronous; `base` is the Hugging Face folder that is miles' version 0, needed where the run is empty."""

    def __init__(self, objects: ObjectStore, log: Log, root: Path, base: Path | None = None, *, mode: str = "default") -> None:
        self._objects, self._log, self._root, self._mode = objects, log, root, mode
        log.refresh()
        if not log.next_number:
            if base is None:
                raise UsageError(f"run {log.run} is empty: give the model that is version 0 (--base FOLDER)", code="miles_base")
            seed_base(objects, log, base, str(base), None, None)
        _check_owner(log)
        self._epoch = BroughtEpoch(log, _PREFIX + keys.new_write_id())
        head = self._epoch.head
        self._state: ModelState = materialize(objects, log, head)
        self.at = _miles_version(log, head)
        """The miles version that the run's latest version is."""
        self._gap: int | None = None
        self._check_folder(head)

    def step(self) -> list[Brought]:
        """Commit what the folder has and the run lacks, as far as its chain reaches."""
        done = []
        while (index := self._next()) is not None:
            done.append(self._bring(index))
        return done

    def _next(self) -> Index | None:
        """The next delta on what the run has, else the newest full checkpoint beyond it."""
        later = [number for number in published(self._root) if number > self.at]
        full: Index | None = None
        for number in later:
            index = read_index(folder_of(self._root, number))
            if index.base_version == self.at:
                return index
            if index.encoding is None:
                full = index
        if later and full is None and self._gap != later[0]:
            self._gap = later[0]
            _log.warning("gap", has=self.at, published=later[0])
        return full

    def _bring(self, index: Index) -> Brought:
        began = time.perf_counter()
        folder = folder_of(self._root, index.version)
        if index.checksum == "adler32":
            _log.warning("weak_checksum", folder=str(folder), checksum="adler32")
        state = read_version(folder, index, self._state)
        digest = _digest(state)
        base = self._epoch.head
        depth = self._log.lineage.depth(base)
        manifest = write_version(
            self._objects,
            self._log.run,
            epoch=self._epoch.epoch,
            base=base,
            write_id=f"{_PREFIX}{index.version:06d}-{digest[:24]}",  # the same after a crash
            base_state=self._state,
            new_state=state,
            facts=VersionFacts(depth=max(index.version, depth + 1), step=index.version, batch_cursor=0),
            mode=self._mode,
            prove=True,
        )
        if manifest.model_digest != digest:
            raise CorruptError(f"{folder} changed while it was read; read it again", code="miles_delta")
        entry = self._epoch.commit(manifest, time.perf_counter() - began)
        self._log.write_hint([0])
        self._state, self.at = state, index.version
        _log.info("brought", miles_version=index.version, version=entry.number, wire_bytes=entry.wire_bytes)
        return Brought(index.version, entry.number, entry.wire_bytes)

    def _check_folder(self, head: int) -> None:
        """That the folder's version is the one that was brought: a trainer that began anew numbers from 1 again."""
        folder = folder_of(self._root, self.at)
        if not head or self.at not in published(self._root):
            return
        index = read_index(folder)
        if index.encoding is None:
            same = _digest(read_version(folder, index, self._state)) == self._log.version(head).model_digest
        else:
            same = not unsettled(folder, index, self._state)
        if not same:
            raise UsageError(
                f"{folder} isn't the version that run {self._log.run} has: its trainer began anew; bring it into a new run",
                code="miles_folder",
            )


def _digest(state: ModelState) -> str:
    return model_digest(tensor_digests(state))


def _miles_version(log: Log, head: int) -> int:
    entry = log.entry(head)
    return entry.step if isinstance(entry, VersionEntry) else 0


def _check_owner(log: Log) -> None:
    newest = log.lineage.newest_epoch
    entry = log.entry(newest) if newest is not None else None
    if isinstance(entry, OpenEntry) and not entry.write_id.startswith(_PREFIX):
        raise ConflictError(
            f"run {log.run} has a trainer (epoch {entry.number}); bring foreign versions into a run of their own",
            code="run_owned",
        )
