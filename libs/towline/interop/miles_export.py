"""A run's versions written into a miles/slime folder, one after another, for engines that read that layout.

The i-th version of the LOG, whatever its entry's number, is weight_v{i}; entry 0 is version 0, the engine's model path. So every
host that exports the run writes the same folders, numbers grow by one, and a fork is just the next delta.
"""

from __future__ import annotations

import fcntl
import time
from dataclasses import dataclass
from pathlib import Path

from towline.delta.state import ModelState
from towline.errors import MissingError, UsageError
from towline.interop.miles_layout import Encoding, folder_of, published, read_index, write_delta, write_full
from towline.store.base import base_files
from towline.store.claims import Hold, put_hold
from towline.store.log import Log
from towline.store.materialize import materialize
from towline.store.objects import ObjectStore

LOCK = ".towline.lock"
HOLD_SECONDS = 1800.0
MAX_CHAIN = 50
"""A follower that is further behind writes a full checkpoint and goes on from there."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A folder that was written."""

    miles_version: int
    version: int
    full: bool
    nbytes: int


class Exporter:
    """Synchronous."""

    def __init__(
        self,
        objects: ObjectStore,
        log: Log,
        root: Path,
        *,
        encoding: Encoding = "xor",
        checksum: str = "xxh3-128",
        max_chain: int = MAX_CHAIN,
        reader: str | None = None,
    ) -> None:
        """`reader`: the name under which this one holds what it has from being collected, where it may write holds."""
        self._objects, self._log, self._root = objects, log, root
        self._encoding: Encoding = encoding
        self._checksum, self._max_chain, self._reader = checksum, max_chain, reader
        self._held: tuple[int, float] | None = None
        self._have: tuple[int, ModelState] | None = None
        """(entry number, state) of the newest version that was written or read."""

    def step(self) -> list[Exported]:
        """Write what the run has and the folder lacks. `UsageError` where the folder is another run's.

        Processes of a host that export to the same folder take turns.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return self._step()

    def _step(self) -> list[Exported]:
        self._log.refresh()
        versions = self._log.lineage.versions()
        if not versions:
            raise MissingError(f"run {self._log.run} has no base model yet; its trainer writes it", code="log_empty")
        there = published(self._root)
        at = there[-1] if there else 0
        if there:
            self._check(at, versions)
        done = []
        target = len(versions) - 1
        old = self._readable(versions[at]) if target - at <= self._max_chain else None
        for number in range(at + 1 if old else max(at + 1, target), target + 1):
            new = self._readable(versions[number])
            if new is not None:
                done.append(self._write(number, versions[number], old, new))
            self._hold()
            old = new  # after a version that retention gave up comes a full checkpoint, and no number is used for another version
        self._hold()
        return done

    def _hold(self) -> None:
        """Renewed long before it expires, and with each version."""
        now = time.time()
        if self._reader is None or self._have is None:
            return
        if self._held is not None and self._held[0] == self._have[0] and now < self._held[1] - HOLD_SECONDS / 2:
            return
        self._held = (self._have[0], now + HOLD_SECONDS)
        put_hold(self._objects, self._log.run, Hold(reader=self._reader, version=self._held[0], until=self._held[1]))

    def _write(self, number: int, version: int, old: ModelState | None, new: ModelState) -> Exported:
        extra = {"towline_run": self._log.run, "towline_version": str(version), "towline_entry": self._log.digest(version)}
        if old is None:
            folder = write_full(self._root, number, new, base_files(self._objects, self._log), extra)
        else:
            folder = write_delta(
                self._root, number, number - 1, old, new, encoding=self._encoding, checksum=self._checksum, extra=extra
            )
        return Exported(number, version, old is None, sum(path.stat().st_size for path in folder.iterdir()))

    def _readable(self, version: int) -> ModelState | None:
        """None where retention gave it up."""
        if self._have is None or self._have[0] != version:
            try:
                self._have = (version, materialize(self._objects, self._log, version, self._have))
            except MissingError as error:
                if error.code != "version_gone":
                    raise
                return None
        return self._have[1]

    def _check(self, at: int, versions: list[int]) -> None:
        """That the newest folder is this run's."""
        extra = read_index(folder_of(self._root, at)).extra
        number = extra.get("towline_version", "")
        ours = extra.get("towline_run") == self._log.run and number.isdigit() and int(number) in versions
        if not ours or extra.get("towline_entry") != self._log.digest(int(number)) or at >= len(versions):
            raise UsageError(
                f"{folder_of(self._root, at)} wasn't exported from run {self._log.run}; name another folder", code="miles_folder"
            )
