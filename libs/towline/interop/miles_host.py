"""A host's local checkpoint brought to a published miles/slime version, as the engine's POST /pull_weights does, for engines that
haven't that route.

Files are replaced whole, and tensors that have their final checksum already are left alone: so a crash amid an XOR is finished
by the next pull, though XOR can't be repeated. LOCAL/.weight_sync/ holds the version and a lock.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from towline.delta.files import load_folder, read_with_metadata, replacing, write_safetensors
from towline.delta.state import ModelState
from towline.errors import CorruptError, MissingError
from towline.interop.miles_layout import Index, folder_of, published, read_index, read_version, unsettled

SYNC = ".weight_sync"


def pull(local: Path, base: Path, source: Path, target: int) -> int:
    """Bring `local` from whatever it is to version `target` of `source`; the number of deltas that were applied.

    base: the Hugging Face folder that is version 0. A copy that is past the target, or whose chain is broken, starts again from
    the newest full checkpoint up to the target, else from `base`. `MissingError` where the target isn't published (yet).
    """
    with _locked(local):
        if target and target not in published(source):
            raise MissingError(f"{folder_of(source, target)} isn't published yet", code="miles_version")
        at, applying = _read(local)
        chain = _chain(source, at, target) if at is not None else None
        if chain is not None and applying is not None and (not chain or chain[0].version != applying):
            chain = None  # half of another version is in there
        if chain is None:
            start = _start(source, target)
            _reset(local, base if start == 0 else folder_of(source, start), start)
            chain = _chain(source, start, target)
            if chain is None:
                raise MissingError(f"{source}: no chain of deltas leads from version {start} to {target}", code="miles_version")
        for index in chain:
            try:
                _apply(local, folder_of(source, index.version), index)
            except CorruptError:
                _write(local, None, None)  # what is in there is no version
                raise
        return len(chain)


def _chain(source: Path, at: int, target: int) -> list[Index] | None:
    """The deltas from `at` to `target`, by their base versions."""
    found: list[Index] = []
    step = target
    while step > at:
        try:
            index = read_index(folder_of(source, step))
        except MissingError:
            return None
        if index.base_version is None or index.base_version >= step:
            return None
        found.append(index)
        step = index.base_version
    return found[::-1] if step == at else None


def _start(source: Path, target: int) -> int:
    """The newest full checkpoint up to the target; 0 is the base."""
    for number in reversed([n for n in published(source) if n <= target]):
        if read_index(folder_of(source, number)).encoding is None:
            return number
    return 0


def _apply(local: Path, folder: Path, index: Index) -> None:
    """One delta. The mark in state.json says between its first and last file that the copy is neither version."""
    state = load_folder(local)
    rest = unsettled(folder, index, state)
    if rest:
        new = read_version(folder, index, state, only=rest)
        _write(local, index.base_version, index.version)
        _replace(local, new, rest)
    _write(local, index.version, None)


def _replace(local: Path, new: ModelState, changed: set[str]) -> None:
    for path in sorted(local.glob("*.safetensors")):
        held, metadata = read_with_metadata(path)
        if changed & held.keys():
            write_safetensors({n: new[n] if n in changed else t for n, t in held.items()}, path, metadata)


def _reset(local: Path, source: Path, version: int) -> None:
    _write(local, None, None)
    for path in local.iterdir():
        if path.is_file():
            path.unlink()
    for path in source.iterdir():
        if path.is_file():
            shutil.copyfile(path, local / path.name)
    _write(local, version, None)


def _read(local: Path) -> tuple[int | None, int | None]:
    """(version, the version that was being applied when the last pull died)."""
    try:
        tree = json.loads((local / SYNC / "state.json").read_bytes())
        return int(tree["version"]), int(tree["applying"]) if "applying" in tree else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None, None


def _write(local: Path, version: int | None, applying: int | None) -> None:
    path = local / SYNC / "state.json"
    if version is None:
        path.unlink(missing_ok=True)
        return
    tree = {"version": f"{version:06d}"} | ({"applying": f"{applying:06d}"} if applying is not None else {})
    with replacing(path) as file:
        file.write(json.dumps(tree).encode())


@contextmanager
def _locked(local: Path) -> Iterator[None]:
    (local / SYNC).mkdir(parents=True, exist_ok=True)
    with (local / SYNC / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
