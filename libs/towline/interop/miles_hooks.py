"""Functions for miles' and slime's own hooks, named there by import path. TOWLINE_RUN names the run's TOML file.

trainer   --custom-update-weight-post-write-path towline.interop.miles_hooks.publish
engine    --custom-pull-weights-pre-read-hook     towline.interop.miles_hooks.pre_read
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from towline.config import load_settings
from towline.errors import UnavailableError, UsageError
from towline.interop.miles_export import Exporter
from towline.interop.miles_import import Importer
from towline.interop.miles_layout import published
from towline.store.log import Log
from towline.store.objects import ObjectStore, open_store

RUN = "TOWLINE_RUN"
PRE_READ_SECONDS = 120.0
_POLL_SECONDS = 0.5
_importers: dict[tuple[str, Path], Importer] = {}
_lock = threading.Lock()


def publish(args: Any, published_dir: str, rollout_engines: Any = None) -> None:
    """After the trainer wrote a version: commit it, and what is missing before it, to the run. Rank 0 alone does it.

    `args.hf_checkpoint` is the model that is version 0. Calls for other folders than a version's do nothing.
    """
    del rollout_engines
    folder = Path(published_dir)
    if not folder.name.startswith("weight_v") or int(os.environ.get("RANK", "0")):
        return
    with _lock:
        importer = _importers.get((_run(), folder.parent))
        if importer is None:
            objects, log = _opened()
            importer = Importer(objects, log, folder.parent, Path(args.hf_checkpoint))
            _importers[_run(), folder.parent] = importer
        importer.step()


def pre_read(source_dir: str, target_version: int) -> None:
    """Before an engine reads version `target_version` of `source_dir`: write what that host's folder lacks of the run.

    Engines that share the folder take turns. `UnavailableError` where the run hasn't the version within two minutes.
    """
    root = Path(source_dir)
    give_up = time.monotonic() + PRE_READ_SECONDS
    objects, log = _opened()
    exporter = Exporter(objects, log, root)
    while target_version and not any(number >= target_version for number in published(root)):
        if exporter.step():
            continue
        if time.monotonic() > give_up:
            raise UnavailableError(f"run {log.run} has no version {target_version} yet", code="miles_version")
        time.sleep(_POLL_SECONDS)


def _run() -> str:
    name = os.environ.get(RUN, "")
    if not name:
        raise UsageError(f"{RUN} isn't set; give the run's TOML file", code="miles_run")
    return name


def _opened() -> tuple[ObjectStore, Log]:
    settings = load_settings(Path(_run()))
    objects = open_store(settings.store)
    return objects, Log(objects, settings.run.name)
