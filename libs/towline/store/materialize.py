"""A committed version's state, from the cheapest copy to start from and the deltas after it, verified to the entry's digest."""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from towline.contract.entries import BaseEntry, VersionEntry
from towline.delta.codec import allocate, apply
from towline.delta.state import ModelState, copy_state, layout_digest, layout_of, model_digest, tensor_digests
from towline.errors import CorruptError, MissingError
from towline.store import keys
from towline.store.anchors import AnchorRecord, anchored, load_anchor, read_anchor
from towline.store.log import Log
from towline.store.manifest import Manifest, read_manifest
from towline.store.objects import ObjectStore
from towline.store.transfer import fetch_all

APPLY_WEIGHT = 0.1
"""What applying and verifying one delta costs, in downloads of the model: a network brings a tenth of what memory does."""


@dataclass(frozen=True, slots=True)
class Start:
    """A copy to begin with, the versions to apply on it, and what that costs in bytes of download."""

    kind: Literal["own", "anchor", "full"]
    """full: nothing to begin with; the first of `chain` is a full representation."""
    anchor: AnchorRecord | None
    chain: tuple[int, ...]
    cost: float


def materialize(
    objects: ObjectStore,
    log: Log,
    version: int,
    have: tuple[int, ModelState] | None = None,
    *,
    in_place: bool = False,
    threads: int | None = None,
) -> ModelState:
    """The state of `version`, every tensor verified and the whole equal to its entry's model digest.

    have: a version and its state, to start from where that is cheapest. It is only read, unless `in_place`: then it may be
        changed and returned, and after an error it is to be thrown away.

    Starts from another copy where one is gone or bad; where none of those that the hint names leads there, looks for others
    in the store. `MissingError` where a part isn't here (yet) or, code `version_gone`, was given up for good; `CorruptError` that
    names the part or the tensor where the bytes are wrong.
    """
    if have is not None and have[0] == version:
        _verify(log, version, tensor_digests(have[1]), layout_digest(layout_of(have[1])))
        return have[1]
    failure: CorruptError | MissingError | None = None
    tried: list[Start] = []
    for everywhere in (False, True):  # what was there when the first plan was made may have been collected since
        for start in plan(objects, log, version, have[0] if have else None, everywhere=everywhere):
            if start in tried:
                continue
            tried.append(start)
            try:
                if start.kind == "own" and have is not None:
                    state = have[1] if in_place else copy_state(have[1])
                else:
                    state = load_anchor(objects, start.anchor) if start.anchor else {}
                return _follow(objects, log, version, start.chain, state, threads)
            except (CorruptError, MissingError) as error:
                failure = failure or error
    if isinstance(failure, CorruptError):
        raise failure
    raise (
        _gone(objects, log, version)
        or failure
        or MissingError(f"run {log.run}: version {version} has no copy to start from", code="no_chain")
    )


def _gone(objects: ObjectStore, log: Log, version: int) -> MissingError | None:
    entry = log.entry(version)
    if not isinstance(entry, VersionEntry) or objects.stat(keys.tombstone(log.run, entry.folder)) is None:
        return None
    return MissingError(
        f"run {log.run}: version {version} was given up by retention and is gone; pin what must stay", code="version_gone"
    )


def plan(objects: ObjectStore, log: Log, version: int, have: int | None = None, *, everywhere: bool = False) -> Iterator[Start]:
    """The ways to get at `version`, the cheapest first. Of the anchors it knows those that the hint names, or all that the store
    lists, and reads the record of each that it comes by.

    It walks back from the version, no further than it must to be sure that what it yields is the cheapest: a replica that has
    the version before costs a step, however long the LOG is.
    """
    log.lineage.depth(version)  # `MissingError` where there is none
    hint = None if everywhere else log.read_hint()
    anchors = {0, *(anchored(objects, log.run) if everywhere else hint.anchors if hint else ())}
    found: list[tuple[float, int, Start]] = []
    count = itertools.count()
    chain: list[int] = []
    cost, full, step = 0.0, False, version

    def note(kind: Literal["own", "anchor", "full"], anchor: AnchorRecord | None = None) -> None:
        whole = cost + (anchor.nbytes if anchor else 0)
        heapq.heappush(found, (whole, next(count), Start(kind, anchor, tuple(reversed(chain)), whole)))

    while True:
        while found and found[0][0] <= cost:  # whatever lies further back costs as much at least
            yield heapq.heappop(found)[2]
        if step == have:
            note("own")
        if step in anchors:
            with contextlib.suppress(MissingError, CorruptError):  # what is wrong shows where nothing else leads to the version
                note("anchor", read_anchor(objects, log.run, step))
        parent = log.lineage.parent(step)
        if parent is None:
            break
        entry = log.version(step)
        chain.append(step)
        cost += entry.wire_bytes + APPLY_WEIGHT * entry.model_bytes
        if entry.representation == "full" and not full:
            full = True
            note("full")
        step = parent
    while found:
        yield heapq.heappop(found)[2]


def _follow(
    objects: ObjectStore, log: Log, version: int, chain: tuple[int, ...], state: ModelState, threads: int | None
) -> ModelState:
    """The state with the chain applied, each version verified on the way."""
    if not chain:
        _verify(log, version, tensor_digests(state), layout_digest(layout_of(state)))
    for number in chain:
        manifest = entry_manifest(objects, log.version(number))
        if manifest.representation == "full":
            state = allocate(manifest.layout())
        parts = (data for _, data in fetch_all(objects, manifest.folder, manifest.parts))
        try:
            report = apply(state, parts, layout=manifest.layout(), digests=manifest.digests(), threads=threads)
        except CorruptError as error:
            raise CorruptError(f"run {log.run}, version {number}: {error.message}", code=error.code) from error
        _verify(log, number, report.digests, manifest.layout_digest)
    return state


def entry_manifest(objects: ObjectStore, entry: VersionEntry) -> Manifest:
    """The manifest that the entry names; `CorruptError` where the two don't agree."""
    manifest = read_manifest(objects, entry.folder, entry.manifest_digest)
    same = ("epoch", "base", "write_id", "representation", "layout_digest", "model_digest")
    if any(getattr(manifest, name) != getattr(entry, name) for name in same):
        raise CorruptError(f"{objects.url}: {entry.folder} holds another version than log entry {entry.number}", code="manifest")
    return manifest


def _verify(log: Log, version: int, digests: Mapping[str, str], layout: str) -> None:
    entry = log.entry(version)
    assert isinstance(entry, BaseEntry | VersionEntry)
    if layout != entry.layout_digest or model_digest(digests) != entry.model_digest:
        raise CorruptError(f"run {log.run}: the state isn't version {version}: its digest is another", code="model_digest")
