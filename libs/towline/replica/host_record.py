"""What a host says of its copies: which file is which version, whether it is good or being changed, and what would undo that.

Written whole and by rename, by the host's preparer alone. A file that the record doesn't name is nobody's.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from towline.delta.files import replacing

_NAME = "copies.json"
_log = structlog.get_logger(__name__)


class Undo(msgspec.Struct, frozen=True, kw_only=True):
    """`file` puts the copy back to `version`, whose model digest is `digest`."""

    file: str
    version: int
    digest: str


class CopyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One safetensors file of the folder. `changing`: some of its bytes may be those of `version` already."""

    file: str
    version: int
    digest: str
    state: Literal["good", "changing"] = "good"
    undo: Undo | None = None
    made: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    """No two makings have the same: what a process has found out about one doesn't hold for the next."""


class HostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """In the order in which they were made."""

    run: str
    copies: tuple[CopyRecord, ...] = ()
    schema: int = 1

    def good(self, version: int, digest: str) -> CopyRecord | None:
        return next((c for c in self.copies if (c.version, c.digest, c.state) == (version, digest, "good")), None)

    def files(self) -> set[str]:
        """Every file that the record names."""
        return {copy.file for copy in self.copies} | {copy.undo.file for copy in self.copies if copy.undo is not None}

    def having(self, *copies: CopyRecord) -> HostRecord:
        """With these instead of those of the same files."""
        names = {copy.file for copy in copies}
        return msgspec.structs.replace(self, copies=(*(c for c in self.copies if c.file not in names), *copies))

    def without(self, file: str) -> HostRecord:
        return msgspec.structs.replace(self, copies=tuple(c for c in self.copies if c.file != file))


_decoder, _encoder = msgspec.json.Decoder(HostRecord), msgspec.json.Encoder()


def read_record(folder: Path, run: str) -> HostRecord:
    """Empty where there is none, or one that can't be read or is another run's: then nothing in the folder counts."""
    try:
        record = _decoder.decode((folder / _NAME).read_bytes())
    except FileNotFoundError:
        return HostRecord(run=run)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        _log.error("host_record_unreadable", folder=str(folder), reason=str(error))
        return HostRecord(run=run)
    return record if (record.run, record.schema) == (run, 1) else HostRecord(run=run)


def write_record(folder: Path, record: HostRecord) -> None:
    with replacing(folder / _NAME) as file:
        file.write(_encoder.encode(record))


def lock(path: Path, *, shared: bool) -> int | None:
    """An open file that holds the lock until it is closed, by the kernel where this process dies; None where others hold it.

    `FileNotFoundError` where there is no such file.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
