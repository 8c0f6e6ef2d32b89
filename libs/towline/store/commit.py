"""The entry that makes a staged version a committed one, and a whole epoch for who brings versions from elsewhere."""

from __future__ import annotations

import time

from msgspec import UNSET

from towline.contract.entries import LogEntry, OpenEntry, VersionEntry
from towline.errors import ConflictError, InvariantError
from towline.store.log import Log
from towline.store.manifest import Manifest


def version_entry(log: Log, manifest: Manifest, manifest_digest: str, verify_seconds: float) -> VersionEntry:
    """The next entry of the LOG as it stands; `manifest_digest` is that of the stored bytes. Whoever appends it has verified
    the version."""
    facts = manifest.facts
    return VersionEntry(
        number=log.next_number,
        prev=log.head_digest,
        write_id=manifest.write_id,
        at=time.time(),
        epoch=manifest.epoch,
        base=manifest.base,
        base_digest=log.digest(manifest.base),
        depth=facts.depth,
        skipped=facts.skipped,
        representation=manifest.representation,
        codec=manifest.codec,
        folder=manifest.folder,
        manifest_digest=manifest_digest,
        layout_digest=manifest.layout_digest,
        model_digest=manifest.model_digest,
        density=manifest.density,
        wire_bytes=manifest.wire_bytes,
        model_bytes=manifest.model_bytes,
        step=facts.step,
        batch_cursor=facts.batch_cursor,
        checkpoint=facts.checkpoint,
        probe=facts.probe,
        encode_seconds=manifest.encode_seconds,
        upload_seconds=manifest.upload_seconds,
        verify_seconds=verify_seconds,
        missing_rows=facts.missing_rows,
        skip_reasons=facts.skip_reasons or UNSET,
    )


class BroughtEpoch:
    """An epoch whose versions come from elsewhere: its owner verifies what it brings and commits it itself.

    It is fenced as a trainer is: once a newer `open` stands, nothing of this epoch is committed any more.
    """

    def __init__(self, log: Log, write_id: str) -> None:
        """Open on the latest version, or go on with the epoch that this WRITE_ID has opened. `ConflictError` where it has been
        overtaken by another."""
        self._log = log
        self._write_id = write_id
        entry = log.append(self._open)
        if not isinstance(entry, OpenEntry):
            raise InvariantError(f"log entry {entry.number} has this writer's ID and isn't its open", code="log_rule")
        self.epoch = entry.number
        self._check()

    @property
    def head(self) -> int:
        """The version that the next one stands on."""
        return self._log.lineage.epoch_head(self.epoch)

    def commit(self, manifest: Manifest, verify_seconds: float) -> VersionEntry:
        """Append the verified version, or return it as it stands. `ConflictError` where the epoch isn't the newest any more."""

        def build(log: Log) -> LogEntry:
            stored = log.find(manifest.write_id)
            if isinstance(stored, VersionEntry) and stored.epoch == self.epoch:
                return stored
            self._check()
            return version_entry(log, manifest, manifest.digest, verify_seconds)

        entry = self._log.append(build)
        if not isinstance(entry, VersionEntry):
            raise InvariantError(f"log entry {entry.number} has the version's WRITE_ID and is no version", code="log_rule")
        return entry

    def _open(self, log: Log) -> LogEntry:
        stored = log.find(self._write_id)
        if stored is not None:
            return stored
        base = log.lineage.latest
        return OpenEntry(
            number=log.next_number,
            prev=log.head_digest,
            write_id=self._write_id,
            at=time.time(),
            base=base,
            base_digest=log.digest(base),
            depth=log.lineage.depth(base),
            batch_cursor=0,
            checkpoint=None,
        )

    def _check(self) -> None:
        newest = self._log.lineage.newest_epoch
        if newest != self.epoch:
            raise ConflictError(
                f"run {self._log.run}: epoch {newest} was opened after this one, {self.epoch}; its trainer owns the run",
                code="overtaken",
            )
