"""The name of every object of a run, relative to the store's URL. Nothing else in Towline spells one."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence

from towline.bus.topology import Topology

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_SHARDED_PART = re.compile(r"part-(\d{4})-\d{5}\.safetensors")
_VERSION_FOLDER = re.compile(r"(\d{8,})-(\d{8,})-([A-Za-z0-9][A-Za-z0-9_-]{0,99})")


def is_name(text: str) -> bool:
    """Whether the text may be a WRITE_ID or a checkpoint's name: what another process sent is asked this first."""
    return _NAME.fullmatch(text) is not None


def new_write_id() -> str:
    """A fresh WRITE_ID, 32 hex digits: one for each thing that is written, whatever comes of it."""
    return uuid.uuid4().hex


def log_entry(run: str, number: int) -> str:
    return f"{_run(run)}/log/{number:08d}.json"


def log_pack(run: str, number: int) -> str:
    """256 entries in one object (packs.py)."""
    return f"{_run(run)}/log/pack-{number:08d}"


def head_hint(run: str) -> str:
    return f"{_run(run)}/head.json"


def version_folder(run: str, epoch: int, base: int, write_id: str) -> str:
    """Where a staged version's parts and manifest.json lie; its uploads alone go there."""
    return f"{_run(run)}/versions/{epoch:08d}-{base:08d}-{write_id}"


def manifest(folder: str) -> str:
    return f"{folder}/manifest.json"


def part_name(index: int, shard: int | None = None) -> str:
    """In a version's folder; parts are applied in the order of their names. `shard`: where several writers each wrote some."""
    return f"part-{index:05d}.safetensors" if shard is None else f"part-{shard:04d}-{index:05d}.safetensors"


def lacking_part(names: Sequence[str]) -> str | None:
    """The first part that a version with these, in order, lacks: of one writer from 0 on, or of several, each from 0 on."""
    last, count = -1, 0
    for name in names:
        found = _SHARDED_PART.fullmatch(name)
        if found is None:
            wanted = part_name(count)
        elif (shard := int(found[1])) > last:
            last, count = shard, 0
            wanted = part_name(0, shard)
        else:
            wanted = part_name(count, last)
        if name != wanted:
            return wanted
        count += 1
    return None


def anchor_folder(run: str, version: int, write_id: str) -> str:
    return f"{_run(run)}/anchors/{version:08d}/{write_id}"


def anchor_record(run: str, version: int) -> str:
    """Created last: an anchor without it isn't there."""
    return f"{_run(run)}/anchors/{version:08d}.json"


def checkpoint_folder(run: str, checkpoint: str) -> str:
    return f"{_run(run)}/checkpoints/{checkpoint}"


def log_folder(run: str) -> str:
    return f"{_run(run)}/log/"


def versions_folder(run: str) -> str:
    """Every staged version's folder lies here, as in the three that follow everything of their kind does."""
    return f"{_run(run)}/versions/"


def anchors_folder(run: str) -> str:
    return f"{_run(run)}/anchors/"


def checkpoints_folder(run: str) -> str:
    return f"{_run(run)}/checkpoints/"


def tombstones_folder(run: str) -> str:
    return f"{_run(run)}/tombstones/"


def pins_folder(run: str) -> str:
    return f"{_run(run)}/pins/"


def holds_folder(run: str) -> str:
    return f"{_run(run)}/holds/"


def tombstone(run: str, folder: str) -> str:
    """Says when the folder (of a version, an anchor or a checkpoint) was given up."""
    return f"{tombstones_folder(run)}{relative(run, folder)}.json"


def pin(run: str, version: int, name: str) -> str:
    return f"{pins_folder(run)}{version:08d}-{name}.json"


def hold(run: str, reader: str) -> str:
    return f"{holds_folder(run)}{reader}.json"


def clock(run: str) -> str:
    """Written by whoever asks for the store's time."""
    return f"{_run(run)}/clock"


def relative(run: str, key: str) -> str:
    """The key without the run before it."""
    return key.removeprefix(f"{_run(run)}/")


def parse_version_folder(folder: str) -> tuple[int, int, str] | None:
    """(epoch, base, WRITE_ID) of a staged version's folder; None for a name that isn't one's."""
    found = _VERSION_FOLDER.fullmatch(folder.rpartition("/")[2])
    return (int(found[1]), int(found[2]), found[3]) if found else None


def fingerprint(run: str, epoch: int) -> str:
    """What the epoch's bits depend on; written by the trainer that opened it."""
    return f"{_run(run)}/fingerprints/{epoch:08d}.json"


def blob(run: str, digest: bytes) -> str:
    return f"{_run(run)}/blobs/{digest.hex()}"


def _run(run: str) -> str:
    return Topology(run).run
