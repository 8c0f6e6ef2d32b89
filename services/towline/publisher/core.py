"""What the publisher decides about a staged version, and the entry that commits it. Synchronous; knows no bus.

Everything is decided from the LOG as it stands at the moment of the commit, and decided anew when another entry comes first;
so it may be asked about the same version again, by several publishers at once, after a crash at any point.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import structlog

from towline import faults, spans
from towline.config import PublisherSettings
from towline.contract.entries import BaseEntry, LogEntry, VersionEntry, encode_entry
from towline.contract.policy import Committed, Refused, Staged
from towline.delta.state import ModelState
from towline.errors import CorruptError, InvariantError, MissingError
from towline.publisher.copy import OwnCopy
from towline.publisher.verify import check_sent, reapply
from towline.store import checkpoints, keys
from towline.store.commit import version_entry
from towline.store.log import Log
from towline.store.manifest import Manifest, read_manifest
from towline.store.materialize import materialize
from towline.store.objects import ObjectStore

_log = structlog.get_logger("towline.publisher")


@dataclass(slots=True)
class Figures:
    """What the publisher has done since its start."""

    head: int = 0
    """The newest epoch's head, eligible or not."""
    committed: int = 0
    refused: int = 0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0
    refusals: dict[str, int] = field(default_factory=dict)
    """By code."""


class _Refusal(Exception):
    """The staged version can't be committed, now or later."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code


class PublisherCore:
    """One at a time: the service asks it from one thread."""

    def __init__(self, objects: ObjectStore, run: str, settings: PublisherSettings) -> None:
        self.log = Log(objects, run)
        self.copy = OwnCopy()
        self.figures = Figures()
        self._objects = objects
        self._settings = settings

    def follow(self) -> str | None:
        """Read the LOG to its head and have the state that the next version will stand on; why that can't be yet, or None."""
        self.log.refresh()
        if not self.log.next_number:
            return "log_empty"
        epoch = self.log.lineage.newest_epoch
        if epoch is None:
            return "no_epoch"
        self.figures.head = head = self.log.lineage.epoch_head(epoch)
        if self.log.lineage.quarantined(head):
            return "head_quarantined"
        self._hold(head)
        return None

    def decide(self, staged: Staged) -> Committed | Refused:
        """Commit the staged version or refuse it for good.

        `UnavailableError`, `MissingError` or `CorruptError` where the store, or the base's own bytes, stand in the way: nothing
        is decided then, and the same question may be asked again.
        """
        self.log.refresh()
        try:
            entry = self._committed(staged) or self._commit(staged)
        except _Refusal as refusal:
            self.figures.refused += 1
            self.figures.refusals[refusal.code] = self.figures.refusals.get(refusal.code, 0) + 1
            _log.warning("refused", epoch=staged.epoch, base=staged.base, write_id=staged.write_id, reason=str(refusal))
            return Refused(epoch=staged.epoch, write_id=staged.write_id, reason=str(refusal))
        return Committed(number=entry.number, epoch=staged.epoch, write_id=staged.write_id)

    def _committed(self, staged: Staged) -> LogEntry | None:
        entry = self.log.find(staged.write_id)
        if entry is not None and not isinstance(entry, VersionEntry):
            raise _Refusal("write_id", f"log entry {entry.number} has this WRITE_ID and is no version")
        return entry

    def _commit(self, staged: Staged) -> LogEntry:
        self._admit(staged)
        self._hold(staged.base)
        began = time.perf_counter()
        candidate: ModelState | None = None
        try:
            manifest = read_manifest(self._objects, staged.folder, staged.manifest_digest)
            self._check_facts(staged, manifest)
            with spans.child("version.verify"):
                if self._settings.verify == "reapply":
                    candidate = reapply(self._objects, manifest, self.copy.candidate())
                else:
                    check_sent(self._objects, manifest)
        except (CorruptError, MissingError) as error:
            raise _Refusal(error.code, error.message) from error
        verified = time.perf_counter()
        faults.point("publisher.verified")
        with spans.child(spans.COMMIT, "producer", fixed=True) as span:
            entry = self.log.append(lambda log: self._entry(log, staged, manifest, verified - began))
            if span:
                span.set(version=entry.number, epoch=staged.epoch, base=staged.base, depth=manifest.facts.depth)
        faults.point("publisher.committed")
        commit_seconds = time.perf_counter() - verified
        if candidate is not None:
            self.copy.advance(entry.number, candidate)
        self.figures.head = entry.number
        self.figures.committed += 1
        self.figures.verify_seconds += verified - began
        self.figures.commit_seconds += commit_seconds
        _log.info(
            "committed",
            version=entry.number,
            epoch=staged.epoch,
            base=staged.base,
            depth=manifest.facts.depth,
            wire_bytes=manifest.wire_bytes,
            density=manifest.density,
            verify_seconds=verified - began,
            commit_seconds=commit_seconds,
        )
        return entry

    def _admit(self, staged: Staged) -> None:
        """The LOG's rules, as it stands."""
        lineage = self.log.lineage
        if not keys.is_name(staged.write_id):
            raise _Refusal("write_id", f"{staged.write_id!r} is no WRITE_ID")
        if staged.folder != keys.version_folder(self.log.run, staged.epoch, staged.base, staged.write_id):
            raise _Refusal("folder", f"{staged.folder} isn't where this version belongs")
        if staged.epoch != lineage.newest_epoch:
            raise _Refusal("epoch", f"epoch {staged.epoch} isn't the newest, which is {lineage.newest_epoch}")
        if staged.base != lineage.epoch_head(staged.epoch):
            raise _Refusal("base", f"base {staged.base} isn't the epoch's head, which is {lineage.epoch_head(staged.epoch)}")
        if lineage.quarantined(staged.base):
            raise _Refusal("quarantined", f"base {staged.base} is quarantined")

    def _check_facts(self, staged: Staged, manifest: Manifest) -> None:
        """What the manifest says about the version, against its base."""
        facts, base = manifest.facts, self.log.entry(staged.base)
        assert isinstance(base, BaseEntry | VersionEntry)
        depth = self.log.lineage.depth(staged.base)
        if manifest.layout_digest != base.layout_digest:
            raise _Refusal("layout", "its tensors aren't those of its base")
        if facts.depth <= depth:
            raise _Refusal("depth", f"depth {facts.depth} doesn't grow over its base's, {depth}")
        if not all(depth <= batch < facts.depth for batch in facts.skipped):
            raise _Refusal(
                "skipped", f"it skips batches {list(facts.skipped)}, of which it has only {depth} to {facts.depth - 1}"
            )
        if facts.checkpoint is not None and not self._has_checkpoint(facts.checkpoint):
            raise _Refusal("checkpoint", f"its checkpoint {facts.checkpoint} isn't in the store")

    def _has_checkpoint(self, name: str) -> bool:
        return keys.is_name(name) and checkpoints.exists(self._objects, self.log.run, name)

    def _entry(self, log: Log, staged: Staged, manifest: Manifest, verify_seconds: float) -> LogEntry:
        """Called for each head that the LOG turns out to have."""
        if (stored := self._committed(staged)) is not None:
            return stored
        self._admit(staged)
        entry = version_entry(log, manifest, staged.manifest_digest, verify_seconds)
        try:
            encode_entry(entry)
        except InvariantError as error:
            raise _Refusal(error.code, f"{error.message}; make its probe shorter") from error
        return entry

    def _hold(self, version: int) -> None:
        """Have `version` as the own copy, where it's needed at all."""
        if self._settings.verify != "reapply" or self.copy.version == version:
            return
        have = None if self.copy.version is None else (self.copy.version, self.copy.state)
        self.copy.set(version, materialize(self._objects, self.log, version, have))
        _log.info("holds", version=version)
