"""Bundles for tests: the command line beside them, and a bundle with some of its messages changed and sealed again."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from towline.bundle.folder import stream_path
from towline.bundle.frames import StreamFile, write_message
from towline.bundle.manifest import list_files, read_manifest, write_manifest
from towline.bus.client import Message
from towline.bus.topology import StreamSpec

LIMIT_SECONDS = 120.0


def towline(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "towline.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)


def changed_bundle(bundle: Path, target: Path, **changes: Callable[[Message], bytes]) -> Path:
    """A sealed copy: stream key in small letters -> function of a message that returns its bytes."""
    shutil.copytree(bundle, target)
    for key, change in changes.items():
        path = stream_path(target, StreamSpec(key.upper(), (), 0.0))
        messages = list(StreamFile(path).messages())
        with path.open("wb") as file:
            for message in messages:
                write_message(file, dataclasses.replace(message, data=change(message)))
    return reseal(target)


def reseal(bundle: Path) -> Path:
    """The manifest made anew for the files as they are."""
    manifest = read_manifest(bundle)
    write_manifest(bundle, msgspec.structs.replace(manifest, files=list_files(bundle)))
    return bundle
