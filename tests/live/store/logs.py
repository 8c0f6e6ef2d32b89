"""Appending to a real LOG in tests: entries built on its head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from towline.contract.entries import BaseEntry, LogEntry, OpenEntry, QuarantineEntry, VersionEntry
from towline.store.keys import new_write_id
from towline.store.log import Log

Build = Callable[[Log], LogEntry]


def _common(log: Log, write_id: str | None) -> dict[str, Any]:
    return {"number": log.next_number, "prev": log.head_digest, "write_id": write_id or new_write_id(), "at": 1.0}


def base(write_id: str | None = None) -> Build:
    def build(log: Log) -> LogEntry:
        fields: dict[str, Any] = {"source": "s", "revision": None, "anchor": "a", "layout_digest": "l", "model_digest": "m"}
        return BaseEntry(**_common(log, write_id), **fields)

    return build


def opened(base: int | None = None, write_id: str | None = None) -> Build:
    """On `base`, or on the latest version."""
    chosen = write_id or new_write_id()

    def build(log: Log) -> LogEntry:
        on = log.lineage.latest if base is None else base
        return OpenEntry(
            **_common(log, chosen),
            base=on,
            base_digest=log.digest(on),
            depth=log.lineage.depth(on),
            batch_cursor=0,
            checkpoint=None,
        )

    return build


def version(epoch: int | None = None, write_id: str | None = None, **fields: Any) -> Build:
    """On its epoch's head; of the newest epoch unless one is given."""
    chosen = write_id or new_write_id()

    def build(log: Log) -> LogEntry:
        of = log.lineage.newest_epoch if epoch is None else epoch
        assert of is not None
        on = log.lineage.epoch_head(of)
        common: dict[str, Any] = {"epoch": of, "base": on, "base_digest": log.digest(on), "depth": log.lineage.depth(on) + 1}
        common |= {"skipped": (), "representation": "delta", "codec": "c", "folder": "f", "manifest_digest": "m"}
        common |= {"layout_digest": "l", "model_digest": "m", "density": 0.1, "wire_bytes": 1, "model_bytes": 2, "step": 1}
        common |= {"batch_cursor": 0, "checkpoint": None, "probe": None, "encode_seconds": 0.0, "upload_seconds": 0.0}
        return VersionEntry(**(_common(log, chosen) | common | {"verify_seconds": 0.0} | fields))

    return build


def quarantine(version: int) -> Build:
    return lambda log: QuarantineEntry(**_common(log, None), version=version, reason="bad")
