"""Taking a committed version out of service for good: one entry, after which it and its descendants serve no more."""

from __future__ import annotations

import time

from towline.contract.entries import LogEntry, QuarantineEntry
from towline.errors import UsageError
from towline.store.keys import new_write_id
from towline.store.log import Log

MAX_REASON_CHARACTERS = 1000


def quarantine(log: Log, version: int, reason: str) -> QuarantineEntry | None:
    """Append the entry, or return None where the version is quarantined already, by itself or with an ancestor.

    `UsageError` for entry 0 and for what is no version. Replicas leave the version at their next look at the LOG; its trainer
    exits, and opens from the newest good ancestor with a checkpoint.
    """
    if len(reason) > MAX_REASON_CHARACTERS:
        raise UsageError(f"the reason has more than {MAX_REASON_CHARACTERS} characters; shorten it", code="quarantine_reason")
    write_id = new_write_id()

    def build(log: Log) -> LogEntry:
        if version not in log.lineage:
            raise UsageError(f"version {version}: there is none; see `towline versions list`", code="version_missing")
        if version == 0:
            raise UsageError("version 0 is the base model and can't be quarantined; start another run", code="version_base")
        if log.lineage.quarantined(version) and log.find(write_id) is None:
            raise _Already
        return QuarantineEntry(
            number=log.next_number,
            prev=log.head_digest,
            write_id=write_id,
            at=time.time(),
            version=version,
            reason=reason,
        )

    try:
        entry = log.append(build)
    except _Already:
        return None
    assert isinstance(entry, QuarantineEntry)
    return entry


class _Already(Exception):
    """It is quarantined."""
