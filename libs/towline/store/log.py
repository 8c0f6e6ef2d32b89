"""The LOG: RUN/log/00000042.json, create-only and dense, each entry sealed by the digest in the next.

Whoever wins the create of entry N has decided; a lost reply is settled by reading the entry back. It holds every entry it has
read, checks each against the one before, and serves the lineage that they make.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from towline.contract.entries import LogEntry, OpenEntry, VersionEntry, decode_entry, encode_entry, entry_digest
from towline.errors import CorruptError, InvariantError, MissingError
from towline.store import keys, packs
from towline.store.kept import KeptEntries
from towline.store.lineage import Lineage
from towline.store.objects import ObjectStore, settle

_READERS = 16


_HINTED_ANCHORS = 4
_DIGEST_BYTES = 32


class Head(msgspec.Struct, frozen=True):
    """head.json: the newest entry and anchors that its writer knew. Only ever a hint."""

    number: int
    anchors: tuple[int, ...] = ()


class Log:
    """The LOG of `run`; nothing is read until `refresh`. Thread-safe."""

    def __init__(self, objects: ObjectStore, run: str) -> None:
        self.run = run
        self.lineage = Lineage()
        self._objects = objects
        self._entries = KeptEntries()
        self._new: list[LogEntry] = []
        """Taken since the last `refresh` began."""
        self._digests = bytearray()
        self._write_ids: dict[str, int] = {}
        self._packs = 0
        """That are known to be there."""
        self._lock = threading.RLock()
        self._state = threading.Lock()  # held for moments, never over a request: who finds an entry finds it in the lineage

    @property
    def next_number(self) -> int:
        """The number that the next entry will have, as far as this reader has read."""
        return len(self._entries)

    @property
    def head_digest(self) -> str | None:
        """`prev` of the next entry; None while the LOG is empty."""
        return self._digest(len(self._entries) - 1) if self._digests else None

    def entry(self, number: int) -> LogEntry:
        """`MissingError` if it isn't there, or wasn't at the last `refresh`."""
        with self._state:
            self._known(number)
            return self._entries[number]

    def version(self, number: int) -> VersionEntry:
        """The entry of a version other than 0; `MissingError` otherwise."""
        entry = self.entry(number)
        if not isinstance(entry, VersionEntry):
            raise MissingError(f"run {self.run}: log entry {number} is no committed version", code="version_missing")
        return entry

    def digest(self, number: int) -> str:
        """sha256 of the entry's bytes."""
        with self._state:
            self._known(number)
            return self._digest(number)

    def entries(self) -> list[LogEntry]:
        with self._state:
            return self._entries.all()

    def find(self, write_id: str) -> LogEntry | None:
        """The entry with this WRITE_ID."""
        with self._state:
            number = self._write_ids.get(write_id)
            return None if number is None else self._entries[number]

    def refresh(self) -> list[LogEntry]:
        """Read on to the first entry that is missing, and return the new ones.

        `CorruptError` where an entry isn't what the next one or a reader is told; `InvariantError` where it breaks a rule.
        """
        with self._lock:
            self._new = []
            if not len(self._entries):
                self._take_hinted()
            while (data := self._get(len(self._entries))) is not None:
                self._take(data)
            new, self._new = self._new, []
            return new

    def append(self, build: Callable[[Log], LogEntry]) -> LogEntry:
        """Create the entry that `build` makes for the LOG as it stands, and return it as it is stored.

        Where another writer takes the number first, the LOG is read to its head and `build` is called again, to decide
        everything anew; it may raise to give up. A lost reply is settled by reading back: the same WRITE_ID means done.
        `UnavailableError` leaves it open; calling again with the same WRITE_ID settles it.
        """
        with self._lock:
            self.refresh()
            while True:
                entry = build(self)
                stored = self.find(entry.write_id)
                if stored is not None:
                    return stored
                self._check_built(entry)
                data = settle(self._objects, keys.log_entry(self.run, entry.number), encode_entry(entry))
                self._take(data)
                self.refresh()
                won = self.find(entry.write_id)
                if won is not None:
                    return won

    def read_hint(self) -> Head | None:
        """None where there is no hint, or none that can be read."""
        try:
            return msgspec.json.decode(self._objects.get(keys.head_hint(self.run)), type=Head)
        except (MissingError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def write_hint(self, anchors: Iterable[int] = ()) -> None:
        """Store the head's number, and the newest of the versions that have an anchor: it spares a new reader the probing. Where
        a pack's entries are all there, the pack too."""
        if (number := self.next_number - 1) >= 0:
            newest = tuple(sorted(anchors)[-_HINTED_ANCHORS:])
            self._objects.put(keys.head_hint(self.run), msgspec.json.encode(Head(number, newest)))
        self._write_pack()

    def _check_built(self, entry: LogEntry) -> None:
        if entry.number != self.next_number or entry.prev != self.head_digest:
            raise InvariantError(f"run {self.run}: entry {entry.number} was built on another head than {self.next_number - 1}",
                                 code="log_rule")  # fmt: skip
        self._check_base_digest(entry)
        self.lineage.check(entry)

    def _take_hinted(self) -> None:
        """Read the entries up to the hint side by side. The hint may be behind, or ahead of what a mirror has."""
        hint = self.read_hint()
        head = hint.number if hint else -1
        with ThreadPoolExecutor(_READERS, "towline-log") as pool:
            self._take_packs(pool, (head + 1) // packs.ENTRIES)
            for start in range(self.next_number, head + 1, 4 * _READERS):
                for data in pool.map(self._get, range(start, min(start + 4 * _READERS, head + 1))):
                    if data is None:
                        return
                    self._take(data)

    def _take_packs(self, pool: ThreadPoolExecutor, count: int) -> None:
        """Those of the first `count` packs that are there and hold what the LOG holds, up to the first that doesn't."""
        for start in range(0, count, _READERS):
            for number, found in enumerate(pool.map(self._pack, range(start, min(start + _READERS, count))), start):
                if found is None:
                    return
                for data in found:
                    self._take(data)
                self._packs = number + 1

    def _pack(self, number: int) -> list[bytes] | None:
        try:
            data = self._objects.get(keys.log_pack(self.run, number))
        except MissingError:
            return None
        return packs.open_pack(data, number, self._get((number + 1) * packs.ENTRIES - 1))

    def _write_pack(self) -> None:
        """The next one, if its entries are all there."""
        number = self._packs
        places = range(number * packs.ENTRIES, (number + 1) * packs.ENTRIES)
        if places.stop > self.next_number:
            return
        with self._state:
            entries = [self._entries.stored(place) for place in places]
        self._objects.create(keys.log_pack(self.run, number), packs.encode_pack(entries))
        self._packs = number + 1

    def _get(self, number: int) -> bytes | None:
        try:
            return self._objects.get(keys.log_entry(self.run, number))
        except MissingError:
            return None

    def _take(self, data: bytes) -> None:
        number = len(self._entries)
        entry = decode_entry(data, number)
        if entry.prev != self.head_digest:
            raise CorruptError(
                f"run {self.run}: log entry {number} follows another entry {number - 1} than the one that is stored",
                code="log_chain",
            )
        if entry.write_id in self._write_ids:
            raise InvariantError(
                f"run {self.run}: log entry {number} repeats the write of entry {self._write_ids[entry.write_id]}",
                code="log_rule",
            )
        self._check_base_digest(entry)
        self.lineage.check(entry)
        with self._state:
            self._entries.append(entry, data)
            self._digests += bytes.fromhex(entry_digest(data))
            self._write_ids[entry.write_id] = number
            self.lineage.extend(entry)
        self._new.append(entry)

    def _check_base_digest(self, entry: LogEntry) -> None:
        if not isinstance(entry, OpenEntry | VersionEntry):
            return
        if not 0 <= entry.base < len(self._entries):
            raise InvariantError(f"run {self.run}: log entry {entry.number} has the base {entry.base}", code="log_rule")
        if entry.base_digest != self._digest(entry.base):
            raise CorruptError(
                f"run {self.run}: log entry {entry.number} stands on another entry {entry.base} than the one that is stored",
                code="log_chain",
            )

    def _digest(self, number: int) -> str:
        return self._digests[number * _DIGEST_BYTES : (number + 1) * _DIGEST_BYTES].hex()

    def _known(self, number: int) -> None:
        if not 0 <= number < len(self._entries):
            raise MissingError(f"run {self.run}: the LOG has no entry {number}", code="log_entry_missing")
