"""The name of every object of a run, relative to the store's URL. Nothing else in Towline spells one."""

from __future__ import annotations

import re
import uuid

from towline.bus.topology import Topology

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


def is_name(text: str) -> bool:
    """Whether the text may be a WRITE_ID or a checkpoint's name: what another process sent is asked this first."""
    return _NAME.fullmatch(text) is not None


def new_write_id() -> str:
    """A fresh WRITE_ID, 32 hex digits: one for each thing that is written, whatever comes of it."""
    return uuid.uuid4().hex


def log_entry(run: str, number: int) -> str:
    return f"{_run(run)}/log/{number:08d}.json"


def head_hint(run: str) -> str:
    return f"{_run(run)}/head.json"


def version_folder(run: str, epoch: int, base: int, write_id: str) -> str:
    """Where a staged version's parts and manifest.json lie; its uploads alone go there."""
    return f"{_run(run)}/versions/{epoch:08d}-{base:08d}-{write_id}"


def manifest(folder: str) -> str:
    return f"{folder}/manifest.json"


def part_name(index: int) -> str:
    """In a version's folder; parts are applied in this order."""
    return f"part-{index:05d}.safetensors"


def anchor_folder(run: str, version: int, write_id: str) -> str:
    return f"{_run(run)}/anchors/{version:08d}/{write_id}"


def anchor_record(run: str, version: int) -> str:
    """Created last: an anchor without it isn't there."""
    return f"{_run(run)}/anchors/{version:08d}.json"


def checkpoint_folder(run: str, checkpoint: str) -> str:
    return f"{_run(run)}/checkpoints/{checkpoint}"


def blob(run: str, digest: bytes) -> str:
    return f"{_run(run)}/blobs/{digest.hex()}"


def _run(run: str) -> str:
    return Topology(run).run
