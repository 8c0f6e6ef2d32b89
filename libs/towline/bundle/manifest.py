"""manifest.json of a bundle: every file with its size and digest. It's written last; a folder without it is no bundle.

BUNDLE.md beside this file has the format.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import msgspec

from towline.errors import CorruptError, UsageError
from towline.store.manifest import FileRecord
from towline.store.transfer import file_record

_NAME = re.compile(r"[^/\0]{1,255}(/[^/\0]{1,255}){0,15}")
FORMAT, FORMAT_VERSION = "towline-bundle", 1
MANIFEST = "manifest.json"


class StreamRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in streams/NAME.frames. `created_at` is the stream's; first and last are sequences, 0 where it's empty."""

    created_at: str
    first: int
    last: int
    messages: int


class BundleManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole bundle. `files` are by path, relative to the bundle's folder."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    run: str
    towline: str
    exported_at: float
    head: int
    """The LOG's last entry."""
    checkpoints: tuple[str, ...]
    left_out: tuple[str, ...]
    """What a reader may miss, in words."""
    streams: dict[str, StreamRecord]
    files: tuple[FileRecord, ...]


def write_manifest(folder: Path, manifest: BundleManifest) -> str:
    """Seal the folder; the manifest's sha256, 64 hex digits, which names the bundle."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    temporary = folder / f".{MANIFEST}.tmp"
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)
    return hashlib.sha256(data).hexdigest()


def list_files(folder: Path) -> tuple[FileRecord, ...]:
    """Every file under the folder but the manifest, by path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return tuple(file_record(path.relative_to(folder).as_posix(), path) for path in paths)


def read_manifest(folder: Path) -> BundleManifest:
    """`UsageError` where the folder is no bundle, or one that this reader doesn't know; `CorruptError` where it can't be read."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise UsageError(
            f"{folder}: no bundle, which has a {MANIFEST}, and no run's name or TOML file; make a bundle with "
            "`towline trajectories export RUN -o FOLDER`",
            code="bundle_missing",
        ) from None
    try:
        manifest = msgspec.json.decode(data, type=BundleManifest)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{path} can't be read: {error}", code="bundle_manifest") from error
    if (manifest.format, manifest.format_version) != (FORMAT, FORMAT_VERSION):
        raise UsageError(
            f"{path}: format {manifest.format} {manifest.format_version}, this towline reads {FORMAT} {FORMAT_VERSION}",
            code="bundle_format",
        )
    return manifest


def check_files(folder: Path, manifest: BundleManifest) -> None:
    """Raise `CorruptError` that names the first file that is missing, isn't what the manifest says, or was put among them."""
    named = {record.name for record in manifest.files}
    for part in ("store", "streams"):  # what a reader finds by name there must be what was exported
        for path in sorted((folder / part).rglob("*")):
            if path.is_symlink():
                raise CorruptError(f"{path} is a link, and a bundle has none; copy the bundle again", code="bundle_file")
            if not path.is_dir() and path.relative_to(folder).as_posix() not in named:
                raise CorruptError(f"{path} isn't in the bundle's manifest; remove it", code="bundle_file")
    for record in manifest.files:
        if not _NAME.fullmatch(record.name):
            raise CorruptError(f"{folder / MANIFEST}: {record.name[:99]!r} is no file of a bundle", code="bundle_file")
        path = folder / record.name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise CorruptError(f"{folder / MANIFEST}: {record.name!r} lies outside of the bundle", code="bundle_file")
        if not path.is_file():
            raise CorruptError(f"{path} is missing; copy the whole bundle again", code="bundle_file")
        if file_record(record.name, path) != record:
            raise CorruptError(f"{path} isn't what the bundle's manifest says; copy the bundle again", code="bundle_file")
