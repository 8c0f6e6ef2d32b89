"""Keeps one SGLang server running: started, watched, and started anew on the last served copy when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from towline.engine.sglang.client import SglangClient
from towline.engine.sglang.command import HOST, ServerPlan
from towline.engine.sglang.served import Served
from towline.engine.sglang.server import ServerProcess
from towline.engine.sglang.weights import WeightFiles
from towline.errors import EngineError, TowlineError

_READY_POLL_SECONDS = 0.25
_WATCH_SECONDS = 5.0
_SILENT_CHECKS = 6
"""Unanswered checks in a row, of twice _WATCH_SECONDS each, before a server that still runs counts as dead."""
_RESTARTS, _RESTART_WINDOW_SECONDS = 4, 600.0
_log = structlog.get_logger("towline.engine")


class Supervisor:
    """`launch` once, then `watch`. After a restart `prove` is called before requests go on: it raises `EngineError` where the
    new server doesn't hold the served copy. What can't be brought back is the engine's failure, for good."""

    def __init__(
        self, plan: ServerPlan, files: WeightFiles, folder: Path, served: Served, *, start_seconds: float,
        prove: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._plan, self._files, self._folder, self._served = plan, files, folder, served
        self._start_seconds, self._prove = start_seconds, prove
        self._process: ServerProcess | None = None
        self._client: SglangClient | None = None
        self._restarted: list[float] = []
        self._failure: EngineError | None = None
        self.recovering = ""
        """Why there is no server that serves at the moment, while one is being started; "" otherwise."""
        self._watcher: asyncio.Task[None] | None = None

    @property
    def client(self) -> SglangClient:
        """The one of the newest server."""
        assert self._client is not None
        return self._client

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def check(self) -> None:
        """Raises the engine's failure, where there is one."""
        if self._failure is not None:
            raise self._failure

    async def launch(self, folder: Path, label: str) -> None:
        """Start a server on the folder and wait until it answers."""
        log = self._files.directory / "server.log"
        self._process = process = await ServerProcess.start(self._plan, folder, label, log=log, command_file=self._files.command)
        if self._client is not None:
            await self._client.close()
        self._client = SglangClient(f"http://{HOST}:{process.port}", streams=self._plan.slots)
        until = time.monotonic() + self._start_seconds
        while True:
            with contextlib.suppress(TowlineError):
                await self._client.model_info()
                break
            if not process.alive:
                raise process.failure("ended while it started")
            if time.monotonic() > until:
                await process.end()
                raise process.failure(f"didn't start within {self._start_seconds:g} s")
            await asyncio.sleep(_READY_POLL_SECONDS)
        self._served.label = label

    def watch(self) -> None:
        """From now on bring it back when it ends, or when it is silent for too long."""
        self._watcher = asyncio.create_task(self._watch(), name="sglang-watch")

    async def restart(self, why: str) -> None:
        """A new server on the copy that was served last; for who holds `served.changing`. Raises where none starts."""
        served, began = self._served, time.monotonic()
        assert self._process is not None
        assert served.version is not None
        _log.warning("engine_restarts", version=served.version, reason=why)
        self.recovering = f"its server is being started again on version {served.version}: {why}"
        try:
            self._restarted = [*(at for at in self._restarted if began - at < _RESTART_WINDOW_SECONDS), began]
            if len(self._restarted) > _RESTARTS:
                raise self._process.failure(f"had to be started {len(self._restarted)} times")
            await self._process.end()
            folder = await asyncio.to_thread(self._files.write_full, self._folder, served.state)
            await self.launch(folder, served.new_label(served.version, "retract"))
            await self._prove()
        except TowlineError as error:
            self._failure = error if isinstance(error, EngineError) else EngineError(error.message, code="engine_failed")
            raise self._failure from error
        finally:
            self.recovering = ""
        _log.info("engine_restarted", version=served.version, seconds=round(time.monotonic() - began, 1))

    async def end(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._process is not None:
            await self._process.end()
        if self._client is not None:
            await self._client.close()

    async def _watch(self) -> None:
        while self._failure is None:
            process = self._process
            assert process is not None
            await self._until_dead(process)
            async with self._served.changing:
                # An activation may have failed, and restarted it, meanwhile.
                if self._process is process and self._failure is None:
                    self._served.open.clear()
                    try:
                        await self.restart("it ended by itself" if not process.alive else "it didn't answer")
                    except TowlineError as error:
                        _log.error("engine_failed", reason=error.message)
                    finally:
                        self._served.open.set()

    async def _until_dead(self, process: ServerProcess) -> None:
        """Until it has ended, is silent for too long, or isn't ours any more."""
        silent = 0
        while process.alive and silent < _SILENT_CHECKS and self._process is process:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_SECONDS):
                    await process.wait()
            if process.alive and self._process is process:
                try:
                    await self.client.model_info(seconds=_WATCH_SECONDS)
                    silent = 0
                except TowlineError:
                    silent += 1
