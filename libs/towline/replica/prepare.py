"""Makes a version's weights ready beside those that serve: downloaded, applied to the replica's own copy, verified."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from towline.contract.entries import BaseEntry, Probe, VersionEntry
from towline.delta.files import load_folder
from towline.delta.state import ModelState, model_digest, tensor_digests
from towline.errors import CorruptError, InvariantError
from towline.store.log import Log
from towline.store.objects import ObjectStore
from towline.store.versions import fetch_base_folder, materialize


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A verified copy of a version in host memory; nobody writes into `state`."""

    version: int
    state: ModelState
    files_digest: str
    """Its model digest, which is the entry's."""
    probe: Probe | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A copy that is ready to be activated over another one."""

    copy: Copy
    changed: set[str] | None
    """Tensors whose bytes differ from the other copy's; None where there was none."""
    prepare_seconds: float
    wire_bytes: int


def base_copy(objects: ObjectStore, log: Log, folder: Path) -> Copy:
    """Fetch entry 0's Hugging Face folder (config, weights, tokenizer) and verify it. Blocks."""
    entry = log.entry(0)
    if not isinstance(entry, BaseEntry):
        raise InvariantError(f"run {log.run}: log entry 0 isn't the base model", code="log_rule")
    fetch_base_folder(objects, log, folder)
    state = load_folder(folder)
    if (found := model_digest(tensor_digests(state))) != entry.model_digest:
        raise CorruptError(f"run {log.run}: the base model has the digest {found}, entry 0 says {entry.model_digest}",
                           code="model_digest")  # fmt: skip
    return Copy(version=0, state=state, files_digest=found, probe=entry.probe)


def prepare(objects: ObjectStore, log: Log, version: int, have: Copy | None) -> Prepared:
    """The version's verified weights, from `have` and deltas where that leads there. Blocks; `have` stays as it is.

    `CorruptError` where bytes aren't what their digests say, `UnavailableError` or `MissingError` where they aren't there yet.
    """
    began = time.perf_counter()
    entry = log.entry(version)
    if not isinstance(entry, BaseEntry | VersionEntry):
        raise InvariantError(f"run {log.run}: log entry {version} is no version", code="log_rule")
    state = materialize(objects, log, version, None if have is None else (have.version, have.state))
    changed = None if have is None else {name for name in state if _differs(name, state, have.state)}
    return Prepared(
        copy=Copy(version=version, state=state, files_digest=entry.model_digest, probe=entry.probe),
        changed=changed,
        prepare_seconds=time.perf_counter() - began,
        wire_bytes=_wire_bytes(log, version, have),
    )


def _differs(name: str, new: ModelState, old: ModelState) -> bool:
    if name not in old or new[name].spec != old[name].spec:
        return True
    a, b = new[name].data, old[name].data
    return a is not b and not np.array_equal(a, b)


def _wire_bytes(log: Log, version: int, have: Copy | None) -> int:
    """What the version's chain from the copy weighs; from entry 0 where the copy isn't an ancestor."""
    frm = have.version if have is not None and log.lineage.is_ancestor(have.version, version) else 0
    return sum(log.version(number).wire_bytes for number in log.lineage.chain(version, frm))
