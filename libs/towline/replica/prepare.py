"""Makes a version ready beside those that serve, with patience: others of the host are waited for, so is a store that lags.

What is corrupt or missing for good fails the version, and is said; it is never served.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import structlog

from towline.config import RolloutSettings
from towline.delta.files import INDEX, SINGLE
from towline.delta.state import ModelState
from towline.delta.work import default_threads
from towline.engine.priority import background_executor
from towline.errors import CorruptError, MissingError, UnavailableError
from towline.replica.host import Copy, HostBusyError, HostCopies
from towline.replica.making import CopyMaker, Taken
from towline.store.log import Log
from towline.store.objects import ObjectStore
from towline.store.versions import base_files

T = TypeVar("T")
CORRUPT_TRIES = 5
"""Corrupt downloads of one version before it counts as failed here."""
_FIRST_RETRY_SECONDS, _MOST_RETRY_SECONDS, _BUSY_SECONDS = 0.2, 10.0, 0.05
_GONE = "version_gone"
KEEPING_ENGINES = frozenset({"sglang"})
"""Those that read the copy that they serve again, to restart from it."""
_log = structlog.get_logger(__name__)


class VersionFailedError(Exception):
    """The version can't be had on this host."""


class Preparer:
    """`prepare` gives verified copies. `folder` is the replica's own, `on_wait` is told why it waits."""

    def __init__(
        self, *, objects: ObjectStore, log: Log, settings: RolloutSettings, engine: str, folder: Path,
        on_wait: Callable[[str], None],
    ) -> None:  # fmt: skip
        shared = Path(settings.copy_folder) / log.run if settings.copy_folder else folder.parent / "host-copies"
        self._host = HostCopies(shared, log.run)
        self._maker = CopyMaker(
            self._host, objects, budget_bytes=settings.copy_budget_bytes, threads=prepare_threads(settings),
            keeps=engine in KEEPING_ENGINES,
        )  # fmt: skip
        self._objects, self._log, self._folder, self._on_wait = objects, log, folder, on_wait
        self._missing_seconds = settings.missing_seconds
        self._executor = background_executor("prepare")

    def close(self) -> None:
        """What runs on the thread ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, version: int, wanted: Callable[[], bool]) -> Taken | None:
        """None where the version isn't wanted any more. `VersionFailedError`: corrupt, or missing for too long."""
        return await self._patiently(version, lambda: self._maker.take(self._log, version), wanted)

    async def changed(self, taken: Taken, served: Copy | None, live: int | None) -> set[str] | None:
        """Tensors whose bytes differ from those of version `live`, which the engine has; None where that isn't known.

        `served` is the copy of the version that the replica serves.
        """
        if live is not None and taken.changed_from == live:
            return taken.changed
        if served is None or not served.held or served.version != live:
            return None
        old, new = served.state, taken.copy.state
        return await self._run(lambda: {name for name in new if _differs(name, new, old)})

    async def engine_folder(self, copy: Copy) -> Path | None:
        """A Hugging Face folder for the engine's start: the base model's other files, and the copy as its weights."""
        return await self._patiently(copy.version, lambda: self._engine_folder(copy), lambda: True)

    def _engine_folder(self, copy: Copy) -> Path:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        for name, data in base_files(self._objects, self._log).items():
            if name != INDEX:
                (self._folder / name).write_bytes(data)
        (self._folder / SINGLE).symlink_to(copy.path.resolve())
        return self._folder

    async def _patiently(self, version: int, work: Callable[[], T], wanted: Callable[[], bool]) -> T | None:
        wait, corrupt, began = _FIRST_RETRY_SECONDS, 0, time.monotonic()
        while True:
            pause = wait
            try:
                return await self._run(work)
            except HostBusyError as error:
                pause = _BUSY_SECONDS
                self._on_wait(f"version {version}: {error.message}")
            except (UnavailableError, MissingError) as error:
                _log.warning("prepare_waits", version=version, reason=error.message)
                self._on_wait(f"version {version}: {error.message}")
                missing = isinstance(error, MissingError) and time.monotonic() - began > self._missing_seconds
                if missing or error.code == _GONE:
                    raise VersionFailedError(error.message) from error
            except CorruptError as error:
                corrupt += 1
                _log.error("prepare_corrupt", version=version, attempt=corrupt, reason=error.message)
                self._on_wait(f"version {version}: {error.message}")
                if corrupt >= CORRUPT_TRIES:
                    raise VersionFailedError(error.message) from error
            await asyncio.sleep(pause)
            if pause == wait:
                wait = min(2 * wait, _MOST_RETRY_SECONDS)
            if not wanted():
                return None

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def prepare_threads(settings: RolloutSettings) -> int:
    """As set, or what the engine leaves of the cores that this process may use; at least 1."""
    return settings.prepare_threads or max(default_threads() - settings.threads, 1)


def _differs(name: str, new: ModelState, old: ModelState) -> bool:
    if name not in old or new[name].spec != old[name].spec:
        return True
    return not np.array_equal(new[name].data, old[name].data)
