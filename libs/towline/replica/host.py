"""The copies of a host: verified weights in files that every replica there maps, made by one of them at a time.

`take` gives a version's copy. One that is there already is verified and shared; else whoever gets the preparer's lock makes
it, beside the others or, where the budget holds one copy, in place. The kernel frees the locks of a process that dies; the
next preparer finds in the host's record what is good, puts back what was half changed, and throws away what is nobody's.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from towline.contract.entries import BaseEntry, Probe, VersionEntry
from towline.delta.files import read_safetensors
from towline.delta.state import ModelState, model_digest, tensor_digests
from towline.errors import CorruptError, InvariantError, MissingError, UnavailableError
from towline.replica.host_record import CopyRecord, HostRecord, lock, read_record, write_record
from towline.replica.journal import roll_back
from towline.store.log import Log

SUFFIX, UNDO_SUFFIX, SCRATCH_SUFFIX = ".safetensors", ".undo", ".tmp"
_PREPARER = "preparer.lock"
_log = structlog.get_logger(__name__)


class HostBusyError(UnavailableError):
    """Another replica of this host prepares, or still uses what has to be changed: ask again soon."""


@dataclass(slots=True, eq=False)
class Copy:
    """A verified copy of a version. `state` is mapped from `path` and read-only.

    Until `release` the file stays and keeps its bytes. After it, a copy of a host that works in place may change under its
    reader; any other keeps its bytes for whoever has mapped it.
    """

    version: int
    state: ModelState
    files_digest: str
    """Its model digest, which is the entry's."""
    probe: Probe | None
    path: Path
    handle: int | None

    @property
    def held(self) -> bool:
        return self.handle is not None

    def release(self) -> None:
        """A second call does nothing."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None


class HostCopies:
    """The folder, its record and its locks. Blocking; several of it in one process or in many share a folder."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder, self.run = folder, run
        folder.mkdir(parents=True, exist_ok=True)
        self._verified: set[str] = set()
        self._bad: set[str] = set()

    def record(self) -> HostRecord:
        return read_record(self.folder, self.run)

    def write(self, record: HostRecord) -> None:
        write_record(self.folder, record)

    def path(self, copy: CopyRecord) -> Path:
        return self.folder / copy.file

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Hold the host's preparer lock, on a folder in which everything is as the record says. `HostBusyError`."""
        path = self.folder / _PREPARER
        path.touch()
        handle = lock(path, shared=False)
        if handle is None:
            raise HostBusyError(f"{self.folder}: another replica of this host prepares a version", code="host_busy")
        try:
            self._recover()
            yield
        finally:
            os.close(handle)

    def open(self, log: Log, version: int) -> Copy | None:
        """The version's copy if there is a good one; each process verifies a file once. `HostBusyError`: it's being changed."""
        entry = version_entry(log, version)
        record = self.record().good(version, entry.model_digest)
        if record is None:
            return None
        path = self.path(record)
        try:
            handle = lock(path, shared=True)
        except FileNotFoundError:
            return None
        if handle is None:
            raise HostBusyError(f"{path}: another replica of this host is changing it", code="host_busy")
        try:
            # What the record said may be past by the time that the lock was had.
            if self.record().good(version, entry.model_digest) == record and os.fstat(handle).st_ino == path.stat().st_ino:
                state = self._verify(record, path, version)
                if state is not None:
                    return Copy(version, state, entry.model_digest, entry.probe, path, handle)
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        return None

    def trust(self, record: CopyRecord) -> None:
        """This process has just made the file and verified every byte of it."""
        self._verified.add(record.made)

    def drop(self, record: CopyRecord) -> bool:
        """Delete a copy that nobody uses; False where somebody does. The preparer's alone."""
        with contextlib.suppress(FileNotFoundError):
            handle = lock(self.path(record), shared=False)
            if handle is None:
                return False
            os.close(handle)
        self.write(self.record().without(record.file))
        self.path(record).unlink(missing_ok=True)
        if record.undo is not None:
            (self.folder / record.undo.file).unlink(missing_ok=True)
        return True

    def put_back(self, record: CopyRecord) -> CopyRecord | None:
        """Undo what was changed in place; the copy as it is then, or None where that can't be had and it was dropped."""
        undo = record.undo
        if undo is not None:
            good = CopyRecord(file=record.file, version=undo.version, digest=undo.digest)
            with contextlib.suppress(MissingError, CorruptError):
                state = map_writable(self.path(record))
                began = time.perf_counter()
                roll_back(self.folder / undo.file, state)
                if model_digest(tensor_digests(state)) == undo.digest:
                    self.write(self.record().having(good))
                    self.trust(good)
                    (self.folder / undo.file).unlink(missing_ok=True)
                    _log.info("copy_put_back", version=undo.version, frm=record.version, seconds=time.perf_counter() - began)
                    return good
        _log.error("copy_lost", file=record.file, version=record.version)
        self.write(self.record().without(record.file))
        self.path(record).unlink(missing_ok=True)
        return None

    def _recover(self) -> None:
        """Bring folder and record together. Only under the preparer's lock: what is half done has nobody who does it."""
        for copy in self.record().copies:
            if copy.state == "changing":
                _log.warning("copy_half_changed", file=copy.file, version=copy.version)
                self.put_back(copy)
            elif not self.path(copy).exists() or copy.made in self._bad:
                self.drop(copy)
        named = self.record().files()
        for path in self.folder.iterdir():
            if path.suffix in (SUFFIX, UNDO_SUFFIX, SCRATCH_SUFFIX) and path.name not in named:
                path.unlink(missing_ok=True)

    def _verify(self, record: CopyRecord, path: Path, version: int) -> ModelState | None:
        if record.made in self._bad:
            return None
        try:
            state = read_safetensors(path)
            if record.made in self._verified or model_digest(tensor_digests(state)) == record.digest:
                self._verified.add(record.made)
                return state
        except CorruptError as error:
            _log.error("copy_unreadable", file=record.file, reason=error.message)
        _log.error("copy_corrupt", file=record.file, version=version)
        self._bad.add(record.made)
        return None


def version_entry(log: Log, version: int) -> BaseEntry | VersionEntry:
    entry = log.entry(version)
    if not isinstance(entry, BaseEntry | VersionEntry):
        raise InvariantError(f"run {log.run}: log entry {version} is no version", code="log_rule")
    return entry


def map_writable(path: Path) -> ModelState:
    """The file's tensors, mapped and shared: what is written there is in the file."""
    try:
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE)
    except FileNotFoundError:
        raise MissingError(f"there is no file {path}") from None
    return read_safetensors(memoryview(mapped))
