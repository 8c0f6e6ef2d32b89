"""What lies under a run in the store, folder by folder, as the garbage collector needs to know it. Reads; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from towline.contract.entries import VersionEntry
from towline.errors import CorruptError, MissingError
from towline.store import checkpoints, claims, keys
from towline.store.anchors import AnchorRecord, read_anchor
from towline.store.claims import Hold
from towline.store.keys import tombstone
from towline.store.log import Log
from towline.store.objects import ObjectInfo, ObjectStore
from towline.store.retention import Kind, Stock, Thing

_MANIFEST = "manifest.json"


def take_stock(objects: ObjectStore, log: Log, holds: tuple[Hold, ...] = ()) -> Stock:
    """Read what lies there, then the LOG to its head. `holds`: of readers that the store doesn't know of."""
    run = log.run
    tombs = {info.key: info.modified for info in objects.list(keys.tombstones_folder(run))}
    found: list[_Folder] = []
    found += _folders(objects, "version", keys.versions_folder(run), 1)
    found += _folders(objects, "checkpoint", keys.checkpoints_folder(run), 1)
    anchors = _folders(objects, "anchor", keys.anchors_folder(run), 2)
    standing, held = claims.pins(objects, run), [*claims.holds(objects, run), *holds]
    log.refresh()
    things = [_thing(objects, log, folder, tombs) for folder in found]
    things += [_anchor(objects, run, folder, tombs) for folder in anchors]
    return Stock(things=things, pins=standing, holds=held, opened_at=_opened_at(objects, log))


def tombs_of_nothing(objects: ObjectStore, log: Log, stock: Stock) -> list[str]:
    """Tombstones whose folder is gone and that nobody needs: those of committed versions say for good that they are gone."""
    there = {keys.tombstone(log.run, thing.folder) for thing in stock.things}
    there |= {keys.tombstone(log.run, e.folder) for e in log.entries() if isinstance(e, VersionEntry)}
    return [info.key for info in objects.list(keys.tombstones_folder(log.run)) if info.key not in there]


@dataclass(slots=True)
class _Folder:
    kind: Kind
    path: str
    files: dict[str, ObjectInfo] = field(default_factory=dict)

    def thing(
        self,
        tombs: Mapping[str, float],
        run: str,
        *,
        keys: tuple[str, ...],
        complete: bool,
        version: int | None,
        stage: tuple[int, int] | None = None,
        recorded: bool = True,
    ) -> Thing:
        times = [info.modified for info in self.files.values()]
        return Thing(
            kind=self.kind,
            folder=self.path,
            keys=keys,
            nbytes=sum(info.size for info in self.files.values()),
            oldest=min(times),
            newest=max(times),
            complete=complete,
            version=version,
            stage=stage,
            recorded=recorded,
            given_up=tombs.get(tombstone(run, self.path)),
        )


def _folders(objects: ObjectStore, kind: Kind, prefix: str, depth: int) -> list[_Folder]:
    """The folders `depth` levels under the prefix."""
    found: dict[str, _Folder] = {}
    for info in objects.list(prefix):
        parts = info.key.removeprefix(prefix).split("/", depth)
        if len(parts) <= depth:
            continue  # an anchor's record stands beside its folder
        path = prefix + "/".join(parts[:depth])
        found.setdefault(path, _Folder(kind, path)).files[parts[depth]] = info
    return [found[path] for path in sorted(found)]


def _thing(objects: ObjectStore, log: Log, folder: _Folder, tombs: Mapping[str, float]) -> Thing:
    files = folder.files
    entry = _entry_of(log, folder) if folder.kind == "version" else None
    manifest = _MANIFEST in files
    complete, stage = manifest, None
    version = entry.number if entry is not None else None
    if entry is not None:
        complete = manifest and sum(info.size for name, info in files.items() if name != _MANIFEST) == entry.wire_bytes
    elif folder.kind == "version":
        name = keys.parse_version_folder(folder.path)
        stage = name[:2] if name is not None else None
    elif manifest:
        stage = _checkpoint_stage(objects, log, folder.path)
    order = tuple(_order(files, _MANIFEST))
    return folder.thing(tombs, log.run, keys=order, complete=complete, stage=stage, version=version)


def _entry_of(log: Log, folder: _Folder) -> VersionEntry | None:
    parsed = keys.parse_version_folder(folder.path)
    entry = log.find(parsed[2]) if parsed is not None else None
    return entry if isinstance(entry, VersionEntry) and entry.folder == folder.path else None


def _checkpoint_stage(objects: ObjectStore, log: Log, folder: str) -> tuple[int, int] | None:
    """What an uncommitted checkpoint was made for; a committed one's name says more than its manifest."""
    name = folder.rpartition("/")[2]
    if any(isinstance(entry, VersionEntry) and entry.checkpoint == name for entry in log.entries()):
        return None
    try:
        meta = checkpoints.read_meta(objects, log.run, name)
    except (MissingError, CorruptError):
        return None
    return meta.epoch, meta.base


def _anchor(objects: ObjectStore, run: str, folder: _Folder, tombs: Mapping[str, float]) -> Thing:
    number, _, _ = folder.path.removeprefix(keys.anchors_folder(run)).partition("/")
    version = int(number) if number.isdigit() else -1
    record = _record(objects, run, version)
    recorded = record is not None and record.folder == folder.path
    complete = recorded and record is not None and all(
        file.name in folder.files and folder.files[file.name].size == file.nbytes for file in record.files
    )  # fmt: skip
    first = [keys.anchor_record(run, version)] if recorded else []
    return folder.thing(
        tombs, run, keys=(*first, *_order(folder.files, "")), complete=complete, recorded=recorded, version=version
    )


def _record(objects: ObjectStore, run: str, version: int) -> AnchorRecord | None:
    try:
        return read_anchor(objects, run, version)
    except (MissingError, CorruptError):
        return None


def _order(files: Mapping[str, ObjectInfo], first: str) -> Iterator[str]:
    """The keys, the one that makes the folder whole first."""
    yield from (info.key for name, info in files.items() if name == first)
    yield from (info.key for name, info in sorted(files.items()) if name != first)


def _opened_at(objects: ObjectStore, log: Log) -> float | None:
    newest = log.lineage.newest_epoch
    info = objects.stat(keys.log_entry(log.run, newest)) if newest is not None else None
    return info.modified if info else None
