"""Log entries for tests, with everything filled in that a test doesn't care about."""

from __future__ import annotations

from typing import Any

from towline.contract.entries import BaseEntry, OpenEntry, QuarantineEntry, VersionEntry


def base(**fields: Any) -> BaseEntry:
    common: dict[str, Any] = {"number": 0, "prev": None, "write_id": "w0", "at": 0.0, "source": "folder", "revision": None}
    common |= {"anchor": "run/anchors/00000000/w0", "layout_digest": "l", "model_digest": "m0"}
    return BaseEntry(**(common | fields))


def opened(number: int, base: int, depth: int, **fields: Any) -> OpenEntry:
    common: dict[str, Any] = {
        "number": number,
        "prev": "p",
        "write_id": f"w{number}",
        "at": 0.0,
        "base": base,
        "base_digest": "d",
    }
    common |= {"depth": depth, "batch_cursor": 0, "checkpoint": None}
    return OpenEntry(**(common | fields))


def version(number: int, epoch: int, base: int, depth: int, **fields: Any) -> VersionEntry:
    common: dict[str, Any] = {"number": number, "prev": "p", "write_id": f"w{number}", "at": 0.0, "epoch": epoch, "base": base}
    common |= {"base_digest": "d", "depth": depth, "skipped": (), "representation": "delta", "codec": "c", "folder": "f"}
    common |= {"manifest_digest": "m", "layout_digest": "l", "model_digest": f"m{number}", "density": 0.1, "wire_bytes": 1}
    common |= {"model_bytes": 2, "step": depth, "batch_cursor": 0, "checkpoint": None, "probe": None}
    common |= {"encode_seconds": 0.0, "upload_seconds": 0.0, "verify_seconds": 0.0}
    return VersionEntry(**(common | fields))


def quarantine(number: int, version: int, **fields: Any) -> QuarantineEntry:
    common: dict[str, Any] = {
        "number": number,
        "prev": "p",
        "write_id": f"w{number}",
        "at": 0.0,
        "version": version,
        "reason": "bad",
    }
    return QuarantineEntry(**(common | fields))
