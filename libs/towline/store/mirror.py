"""A run's versions copied to another store, for readers near it: whoever finds an entry of the LOG there finds what it names.

Each file is checked against its digest on the way; a version's parts come first, then its manifest, and its entry last. What the
source has given up isn't copied, its entry is. Checkpoints, blobs and claims stay at home. The copy is a store like any other:
its replicas read it, `towline versions gc` at its site collects it, and nothing that was collected there comes back.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from towline.contract.entries import BaseEntry, VersionEntry, entry_digest
from towline.errors import ConflictError, CorruptError, MissingError
from towline.store import keys
from towline.store.anchors import anchored, read_anchor, record_anchor
from towline.store.log import Log
from towline.store.manifest import FileRecord, read_manifest
from towline.store.objects import ObjectStore, ensure

_FILES = 4
"""On their way at a time."""


@dataclass(slots=True)
class Copied:
    """What a pass copied. `gone`: versions of which the source has the entry alone."""

    entries: int = 0
    versions: int = 0
    anchors: int = 0
    files: int = 0
    bytes: int = 0
    gone: int = 0

    def plain(self) -> dict[str, int]:
        return asdict(self)


class Mirror:
    """`run`'s versions from `source` to `target`; one mirror of a target at a time is enough, two do no harm."""

    def __init__(self, source: ObjectStore, target: ObjectStore, run: str) -> None:
        self.run = run
        self.source, self.target = source, target
        self.log = Log(source, run)
        self._copy = Log(target, run)
        self._anchors: set[int] | None = None
        """That the target has, or has had."""

    @property
    def head(self) -> int:
        """The target's newest entry at the last pass; -1 where it has none."""
        return self._copy.next_number - 1

    def copy(self) -> Copied:
        """All that is new. It can be broken off and called again at any time.

        `ConflictError` where the target holds another LOG, `CorruptError` where the source's bytes aren't what was said of them:
        those aren't copied, nor any entry from there on.
        """
        done = Copied()
        self.log.refresh()
        self._copy.refresh()
        self._check_same()
        with ThreadPoolExecutor(_FILES, "towline-mirror") as pool:
            for number in self._wanted_anchors():
                self._copy_anchor(number, pool, done)
            for number in range(self._copy.next_number, self.log.next_number):
                self._copy_entry(number, pool, done)
        self._copy.refresh()
        if done.entries or done.anchors:
            self._copy.write_hint(self._known_anchors())
        return done

    def _check_same(self) -> None:
        """The digest of an entry seals all entries before it."""
        number = min(self._copy.next_number, self.log.next_number) - 1
        if self._copy.next_number > self.log.next_number or (
            number >= 0 and self._copy.digest(number) != self.log.digest(number)
        ):
            raise ConflictError(
                f"{self.target.url} holds another LOG of run {self.run} than {self.source.url}: mirror into another place, or "
                f"remove {keys.log_folder(self.run)} there, if it's an old run's",
                code="mirror_differs",
            )

    def _known_anchors(self) -> set[int]:
        if self._anchors is None:
            self._anchors = set(anchored(self.target, self.run))
        return self._anchors

    def _wanted_anchors(self) -> list[int]:
        """Those newer than the newest that is known, and the base model's. A reader starts from the newest before what it wants,
        so an older one that was collected at the target isn't needed there again."""
        known = self._known_anchors()
        newest = max(known, default=-1)
        hint = self.log.read_hint()
        there = anchored(self.source, self.run) if newest < 0 or hint is None else hint.anchors
        return [number for number in sorted({0, *there}) if number not in known and (number == 0 or number > newest)]

    def _copy_anchor(self, number: int, pool: ThreadPoolExecutor, done: Copied) -> None:
        try:
            record = read_anchor(self.source, self.run, number)
            self._copy_files(record.folder, record.files, pool, done)
        except MissingError:
            return  # given up meanwhile, or not written yet
        record_anchor(self.target, self.run, record)
        self._known_anchors().add(number)
        done.anchors += 1

    def _copy_entry(self, number: int, pool: ThreadPoolExecutor, done: Copied) -> None:
        entry = self.log.entry(number)
        if isinstance(entry, BaseEntry) and 0 not in self._known_anchors():
            raise MissingError(f"{self.source.url}: run {self.run} has no anchor 0: its base model isn't stored", code="anchor")
        if isinstance(entry, VersionEntry):
            try:
                self._copy_version(entry, pool, done)
            except MissingError:
                done.gone += 1
        key = keys.log_entry(self.run, number)
        data = self.source.get(key)
        if entry_digest(data) != self.log.digest(number):
            raise CorruptError(f"{self.source.url}: {key} has changed since it was read", code="log_chain")
        ensure(self.target, key, data)
        done.entries += 1

    def _copy_version(self, entry: VersionEntry, pool: ThreadPoolExecutor, done: Copied) -> None:
        manifest = read_manifest(self.source, entry.folder, entry.manifest_digest)
        self._copy_files(entry.folder, manifest.parts, pool, done)
        ensure(self.target, keys.manifest(entry.folder), self.source.get(keys.manifest(entry.folder)))
        done.versions += 1

    def _copy_files(self, folder: str, files: Iterable[FileRecord], pool: ThreadPoolExecutor, done: Copied) -> None:
        for nbytes in list(pool.map(lambda file: self._copy_file(folder, file), files)):
            done.files += nbytes is not None
            done.bytes += nbytes or 0

    def _copy_file(self, folder: str, file: FileRecord) -> int | None:
        """Its bytes; None where an earlier pass that was broken off has copied it. Needs room for it among temporary files."""
        key = f"{folder}/{file.name}"
        standing = self.target.stat(key)
        if standing is not None and standing.size == file.nbytes:
            return None
        hasher, nbytes = xxhash.xxh3_128(), 0
        with tempfile.TemporaryDirectory(prefix="towline-mirror-") as scratch:
            path = Path(scratch) / "file"
            with path.open("wb") as out:
                for chunk in self.source.stream(key):
                    hasher.update(chunk)
                    nbytes += out.write(chunk)
            if nbytes != file.nbytes or hasher.hexdigest() != file.digest:
                raise CorruptError(f"{self.source.url}: {key} isn't what its digest says", code="file_digest")
            self.target.put(key, path)
        return nbytes
