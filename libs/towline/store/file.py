"""A store in a folder: file:///path. A put is a synced temporary file that is renamed, or, create-only, hard-linked into place.

It serves processes that share a file system with working hard links and renames (a local disk, NFS).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from towline.config import StoreSettings
from towline.errors import FullError, MissingError, TowlineError, UnavailableError, UsageError
from towline.store.objects import CHUNK_BYTES, ObjectInfo, checked_key

_TEMPORARY = ".tmp"
_PROBE = "towline-check"
_STALE_TEMPORARY_SECONDS = 86400.0
T = TypeVar("T")


class FileStore:
    """See `towline.store.objects.ObjectStore`."""

    def __init__(self, settings: StoreSettings) -> None:
        parts = urlsplit(settings.url)
        path = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or not path.startswith("/") or path == "/":
            raise UsageError(f"store.url = {settings.url!r}: use file:///absolute/path", code="store_url")
        self._root = Path(path)
        self._temporary = self._root / _TEMPORARY

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def get(self, key: str) -> bytes:
        return self._act(key, lambda: self._path(key).read_bytes())

    def stream(self, key: str) -> Iterator[bytes]:
        with self._act(key, lambda: self._path(key).open("rb")) as file:
            while chunk := self._act(key, lambda: file.read(CHUNK_BYTES)):
                yield chunk

    def put(self, key: str, data: bytes | Path) -> None:
        def act(temporary: Path) -> None:
            path = self._path(key)
            os.replace(temporary, path)
            _sync_folder(path.parent)

        self._write(key, data, act)

    def create(self, key: str, data: bytes) -> bool:
        def act(temporary: Path) -> bool:
            path = self._path(key)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            _sync_folder(path.parent)
            return True

        if self._act(key, self._path(key).exists):
            return False
        return self._write(key, data, act)

    def stat(self, key: str) -> ObjectInfo | None:
        try:
            found = self._act(key, self._path(key).stat)
        except MissingError:
            return None
        return ObjectInfo(key, found.st_size, found.st_mtime)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        if folder:
            checked_key(folder)
        yield from self._walk(folder, prefix)

    def delete(self, key: str) -> None:
        with contextlib.suppress(MissingError):
            self._act(key, self._path(key).unlink)

    def check(self, *, writes: bool = True) -> None:
        if not writes:
            if not self._act("", self._root.is_dir):
                raise UsageError(f"{self.url}: no such folder; create it, or correct store.url", code="store_folder")
            return
        self.create(_PROBE, b"towline")
        if self.create(_PROBE, b"towline"):
            raise UsageError(f"{self.url}: the file system let a file be created twice; use another", code="store_lies")
        self._sweep()

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        try:
            with os.scandir(self._root / folder) as found:
                entries = {entry.name + "/" * entry.is_dir(): entry for entry in found}
        except (FileNotFoundError, NotADirectoryError):
            return
        base = f"{folder}/" if folder else ""
        for name, entry in sorted(entries.items(), key=lambda item: item[0]):
            key = base + name
            if entry.name.startswith(".") or not key.startswith(prefix):
                continue
            if name.endswith("/"):
                yield from self._walk(base + entry.name, prefix)
                continue
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat()
                yield ObjectInfo(key, status.st_size, status.st_mtime)

    def _path(self, key: str) -> Path:
        return self._root / checked_key(key)

    def _write(self, key: str, data: bytes | Path, act: Callable[[Path], T]) -> T:
        """Make a synced temporary file of `data`, then `act` on it; it's gone afterwards."""

        def write() -> T:
            temporary = self._temporary / uuid.uuid4().hex
            self._temporary.mkdir(parents=True, exist_ok=True)
            _make_folder(self._path(key).parent)
            try:
                with temporary.open("xb") as file:
                    if isinstance(data, Path):
                        with data.open("rb") as source:
                            shutil.copyfileobj(source, file, CHUNK_BYTES)
                    else:
                        file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                return act(temporary)
            finally:
                temporary.unlink(missing_ok=True)

        return self._act(key, write)

    def _act(self, key: str, act: Callable[[], T]) -> T:
        try:
            return act()
        except OSError as error:
            raise self._fault(key, error) from error

    def _fault(self, key: str, error: OSError) -> TowlineError:
        where = f"{self.url}: {key}"
        if error.errno == errno.ENOENT:
            return MissingError(f"{where}: no such object", code="object_missing")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return FullError(f"{where}: no room on the disk; free some", code="store_full")
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return UsageError(f"{where}: {error.strerror}; allow this user to read and write there", code="store_permission")
        if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.ENAMETOOLONG):
            return UsageError(f"{where}: {error.strerror}; use a folder on a file system with hard links", code="store_folder")
        return UnavailableError(f"{where}: {error.strerror or error}", code="store_unavailable")

    def _sweep(self) -> None:
        """What a writer that was killed left behind."""
        for path in self._temporary.glob("*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_TEMPORARY_SECONDS:
                    path.unlink()


def _make_folder(folder: Path) -> None:
    """The folder, and durable names for it and every parent that was missing."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
