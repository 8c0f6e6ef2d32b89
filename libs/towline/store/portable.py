"""Versions as a folder that stands alone: to keep, to send, to bring into another run or store.

FOLDER/base/…                 the first version as a Hugging Face folder, tokenizer and config included
       versions/NUMBER/…      each later version's parts as they are stored
       export.json            written last: what each file and each version must be

Importing builds every version and compares every digest before anything is committed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from towline.contract.codec import SCHEMA
from towline.contract.entries import BaseEntry, Probe, VersionEntry
from towline.delta.codec import allocate, apply
from towline.delta.files import INDEX, load_folder, save_folder
from towline.delta.state import ModelState, copy_state, layout_of, model_digest, tensor_digests
from towline.errors import ConflictError, CorruptError, MissingError, UsageError
from towline.store import keys
from towline.store.base import base_files, seed_base_state
from towline.store.commit import BroughtEpoch
from towline.store.log import Log
from towline.store.manifest import FileRecord, Manifest, VersionFacts, encode_manifest
from towline.store.materialize import entry_manifest, materialize
from towline.store.objects import ObjectStore, ensure
from towline.store.transfer import fetch, file_record

EXPORT = "export.json"
BASE = "base"


class PortableVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the export. `manifest` is None of the first, which lies in base/ whole."""

    number: int
    entry_digest: str
    """sha256 of its LOG entry, where it comes from."""
    depth: int
    model_digest: str
    step: int
    probe: Probe | None
    manifest: Manifest | None = None


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """export.json."""

    schema: int = SCHEMA
    run: str
    source: str
    """Where the run's base model came from."""
    files: tuple[FileRecord, ...]
    """Of base/ and versions/; names with `/`."""
    versions: tuple[PortableVersion, ...]
    """Each but the first stands on the one before it."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import made: version of the export -> version of the run."""

    numbers: dict[int, int]
    latest: int


def export_versions(objects: ObjectStore, log: Log, first: int, last: int, folder: Path) -> Export:
    """Write the versions from `first` to `last`, which stands on it, into `folder`, which must not exist; whole or not at all.

    Every byte is verified on the way out.
    """
    chain = log.lineage.chain(last, first)
    state = materialize(objects, log, first)
    with replacing_folder(folder) as out:
        base = out / BASE
        write_model(objects, log, state, base)
        records = [file_record(f"{BASE}/{path.name}", path) for path in sorted(base.iterdir())]
        versions = [_portable(log, first, None)]
        for number in chain:
            manifest = entry_manifest(objects, log.version(number))
            target = out / "versions" / f"{number:08d}"
            target.mkdir(parents=True)
            for part in manifest.parts:
                (target / part.name).write_bytes(fetch(objects, manifest.folder, part))
                records.append(FileRecord(f"versions/{number:08d}/{part.name}", part.nbytes, part.digest))
            versions.append(_portable(log, number, manifest))
        entry = log.entry(0)
        source = entry.source if isinstance(entry, BaseEntry) else ""
        export = Export(run=log.run, source=source, files=tuple(records), versions=tuple(versions))
        state = _check_parts(export, out, state)
        if model_digest(tensor_digests(state)) != export.versions[-1].model_digest:
            raise CorruptError(f"run {log.run}: version {last} came out wrong; export it again", code="model_digest")
        (out / EXPORT).write_bytes(msgspec.json.format(msgspec.json.encode(export), indent=1))
    return export


def read_export(folder: Path) -> Export:
    """export.json, and every file that it names there with its digest; `MissingError` or `CorruptError` names the file."""
    path = folder / EXPORT
    if not path.is_file():
        raise MissingError(f"{folder} holds no {EXPORT}: it isn't an export, or not a whole one", code="export_missing")
    try:
        export = msgspec.json.decode(path.read_bytes(), type=Export)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{path} can't be read: {error}", code="export") from error
    if export.schema != SCHEMA or not export.versions or export.versions[0].manifest is not None:
        raise CorruptError(f"{path}: schema {export.schema}, {len(export.versions)} versions", code="export")
    wanted = {f"versions/{v.number:08d}/{p.name}": p for v in export.versions[1:] if v.manifest for p in v.manifest.parts}
    named = {file.name: file for file in export.files}
    if len(named) != len(export.files) or any(v.manifest is None for v in export.versions[1:]):
        raise CorruptError(f"{path} contradicts itself", code="export")
    for name, part in wanted.items():
        if name not in named or (named[name].nbytes, named[name].digest) != (part.nbytes, part.digest):
            raise CorruptError(f"{path} and a manifest in it don't agree on {name}", code="export")
    for file in export.files:
        if ".." in Path(file.name).parts or Path(file.name).is_absolute():
            raise CorruptError(f"{path} names a file outside of its folder: {file.name!r}", code="export")
        if not (folder / file.name).is_file():
            raise MissingError(f"{folder}/{file.name} is missing", code="export_file")
        if file_record(file.name, folder / file.name) != file:
            raise CorruptError(f"{folder}/{file.name} isn't what {EXPORT} says", code="file_digest")
    return export


def import_versions(objects: ObjectStore, log: Log, folder: Path) -> Imported:
    """Bring an export into a run that is empty, as its entry 0 and the versions of an epoch of its own.

    Every version is built and compared before the first is committed. Idempotent: after a crash the same import goes on.
    `ConflictError` where the run holds anything else.
    """
    export = read_export(folder)
    state = load_folder(folder / BASE)
    if model_digest(tensor_digests(state)) != export.versions[0].model_digest:
        raise CorruptError(
            f"{folder}/{BASE} isn't version {export.versions[0].number}: its digest is another", code="model_digest"
        )
    _check_parts(export, folder, copy_state(state))
    identity = hashlib.sha256((folder / EXPORT).read_bytes()).hexdigest()[:24]
    log.refresh()
    _check_empty(log, identity)
    first = export.versions[0]
    others = {file.name.removeprefix(f"{BASE}/"): (folder / file.name).read_bytes() for file in export.files if _is_other(file)}
    source = f"{export.source} ({export.run}, version {first.number})"
    seed_base_state(objects, log, state, others, source, None, first.probe)
    numbers = {first.number: 0}
    if export.versions[1:]:
        epoch = BroughtEpoch(log, f"import-{identity}")
        for place, version in enumerate(export.versions[1:], 1):
            write_id = f"import-{identity}-{place}"
            stored = log.find(write_id)
            if not isinstance(stored, VersionEntry):
                manifest = _staged(objects, log, epoch, version, folder, write_id, first.depth)
                stored = epoch.commit(manifest, 0.0)
            numbers[version.number] = stored.number
    log.write_hint([0])
    return Imported(numbers, log.lineage.latest)


def write_model(objects: ObjectStore, log: Log, state: ModelState, folder: Path) -> list[Path]:
    """A Hugging Face folder of the state, with the base model's tokenizer and config."""
    files = save_folder(state, folder)
    for name, data in base_files(objects, log).items():
        (folder / name).write_bytes(data)
    return files


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that becomes `path` when the block ends well, and vanishes when it doesn't."""
    if path.exists():
        raise UsageError(f"{path} exists already: name another output, or remove it", code="output_exists")
    if not path.absolute().parent.is_dir():
        raise MissingError(f"there is no folder {path.absolute().parent}; create it", code="output_parent")
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.absolute().parent))
    try:
        os.chmod(temporary, 0o755)
        yield temporary
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _portable(log: Log, number: int, manifest: Manifest | None) -> PortableVersion:
    entry = log.entry(number)
    assert isinstance(entry, BaseEntry | VersionEntry)
    return PortableVersion(
        number=number,
        entry_digest=log.digest(number),
        depth=log.lineage.depth(number),
        model_digest=entry.model_digest,
        step=entry.step if isinstance(entry, VersionEntry) else 0,
        probe=entry.probe,
        manifest=manifest,
    )


def _check_parts(export: Export, folder: Path, state: ModelState) -> ModelState:
    """The last version's state, each on the way verified. `state` is the first's, and is written into."""
    layout = layout_of(state)
    for version in export.versions[1:]:
        assert version.manifest is not None
        if version.manifest.representation == "full":
            state = allocate(layout)
        parts = [folder / "versions" / f"{version.number:08d}" / part.name for part in version.manifest.parts]
        report = apply(state, (part.read_bytes() for part in parts), layout=layout, digests=version.manifest.digests())
        if model_digest(report.digests) != version.model_digest:
            raise CorruptError(f"{folder}: version {version.number} comes out as another model", code="model_digest")
    return state


def _check_empty(log: Log, identity: str) -> None:
    ours = {f"import-{identity}"}
    foreign = [e.number for e in log.entries()[1:] if not e.write_id.startswith(tuple(ours))]
    if foreign:
        raise ConflictError(
            f"run {log.run} has entries of its own (entry {foreign[0]}); import into a run with a new name", code="run_not_empty"
        )


def _is_other(file: FileRecord) -> bool:
    name = Path(file.name)
    return name.parts[0] == BASE and name.suffix != ".safetensors" and name.name != INDEX


def _staged(
    objects: ObjectStore, log: Log, epoch: BroughtEpoch, version: PortableVersion, folder: Path, write_id: str, depth: int
) -> Manifest:
    """The version uploaded under this run's names; its parts are the same bytes."""
    found = version.manifest
    assert found is not None
    facts = VersionFacts(
        depth=version.depth - depth,
        skipped=tuple(batch - depth for batch in found.facts.skipped),
        step=version.step,
        batch_cursor=0,  # of a CONTROL that isn't this run's
        missing_rows=found.facts.missing_rows,
        skip_reasons=found.facts.skip_reasons,
        probe=version.probe,
    )
    manifest = msgspec.structs.replace(found, run=log.run, epoch=epoch.epoch, base=epoch.head, write_id=write_id, facts=facts)
    upload(objects, manifest, [folder / "versions" / f"{version.number:08d}" / part.name for part in manifest.parts])
    return manifest


def upload(objects: ObjectStore, manifest: Manifest, parts: Sequence[Path]) -> None:
    """The parts, then the manifest that names them."""
    for path in parts:
        objects.put(f"{manifest.folder}/{path.name}", path)
    ensure(objects, keys.manifest(manifest.folder), encode_manifest(manifest))
