"""A trainer's rank other than 0: it does what rank 0 says, on three channels side by side, until it's told to stop.

It has no lease, writes neither LOG nor CONTROL, and tells nobody anything: a rank that can't go on exits, and all start again.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import structlog
import uvloop

from towline.access.identity import as_role
from towline.access.roles import TRAINER
from towline.bus.client import Bus
from towline.config import Settings, load_settings
from towline.errors import TowlineError, UnavailableError
from towline.learner.advantages.base import Advantage
from towline.learner.registry import ADVANTAGES, look_up
from towline.learner.world import World, join_world, place
from towline.runtime.logging import configure_logging
from towline.runtime.service import exit_code
from towline.store.blobs import Blobs
from towline.store.log import Log
from towline.store.objects import ObjectStore, open_store
from towline.trainer import commands
from towline.trainer.commands import CHANNELS, ROWS, STAGE, WORK, AnyCommand, decode_command
from towline.trainer.loading import Loading
from towline.trainer.member import Member
from towline.trainer.rows import Gatherer
from towline.trainer.watch import LogWatch, cancel

PARENT_POLL_SECONDS = 0.5
POLL_SECONDS = 0.5

log_line = structlog.get_logger(__name__)


def run_follower(config: Path, replica: str | None) -> NoReturn:
    """The rank's whole life, from its settings to the process's end."""
    name = replica or re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())
    rank, _ = place()
    # Whoever stops the trainer tells rank 0, which tells the others when it's done.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        settings = as_role(load_settings(config), TRAINER)
        configure_logging(settings.service, service="trainer", replica=f"{name}.{rank}", run=settings.run.name)
    except TowlineError as error:
        exit_now(exit_code(error))
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        runner.run(_follow(settings, name, rank))
    except BaseException as error:  # noqa: BLE001  it ends here, as one line and a code
        exit_now(exit_code(error))
    exit_now(0)


def exit_now(code: int) -> NoReturn:
    """At once: a thread that waits for a rank that is gone would hold up the process's end, and the others with it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_parent() -> None:
    """End this process once its launcher is gone: a rank alone is of no use, and nobody would end it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_SECONDS)
        print("stopped: the launcher of the ranks is gone", file=sys.stderr, flush=True)
        exit_now(1)

    threading.Thread(target=watch, name="towline-parent", daemon=True).start()


async def _follow(settings: Settings, replica: str, rank: int) -> None:
    loading = Loading(settings.trainer.backend)
    objects = open_store(settings.store)
    world = await asyncio.to_thread(join_world, settings.trainer.device, settings.trainer.rank_timeout_seconds)
    worlds: dict[str, World] = {}
    for name in CHANNELS:
        worlds[name] = await asyncio.to_thread(world.channel)
    await asyncio.to_thread(loading.wait)
    run = settings.run.name
    bus = await Bus.connect(settings.bus, run=run, client_name=f"{run}.trainer.{replica}.{rank}", blobs=Blobs(objects, run))
    try:
        await _Rank(settings, objects, bus, worlds).run()
    finally:
        await bus.close()


class _Rank:
    def __init__(self, settings: Settings, objects: ObjectStore, bus: Bus, worlds: dict[str, World]) -> None:
        self._worlds = worlds
        self._member = Member(settings, objects, worlds)
        self._log = Log(objects, settings.run.name)
        self._watch = LogWatch(Log(objects, settings.run.name), bus, POLL_SECONDS)
        self._advantage: Advantage = look_up("trainer.advantage", ADVANTAGES, settings.trainer.advantage)
        self._bus = bus
        self._settings = settings
        self._gatherer: Gatherer | None = None

    async def run(self) -> None:
        """Until every channel was stopped; the first error ends all."""
        loops = {asyncio.create_task(self._serve(channel), name=f"rank-{channel}") for channel in CHANNELS}
        try:
            while loops:
                done, loops = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await cancel(*loops)

    async def _serve(self, channel: str) -> None:
        actions: dict[str, Callable[[Any], Awaitable[None]]] = {ROWS: self._rows, WORK: self._work, STAGE: self._stage}
        while True:
            command = decode_command(await self._next(channel))
            if isinstance(command, commands.Stop):
                return
            if isinstance(command, commands.Still):
                continue
            try:
                await actions[channel](command)
            except TowlineError as error:
                if not self._member.agreed(error):
                    raise
                # Rank 0 met the same and decides what comes next.
                log_line.warning("a command failed", command=type(command).__name__, code=error.code, reason=error.message)

    async def _next(self, channel: str) -> bytes:
        try:
            return await asyncio.to_thread(self._worlds[channel].broadcast, None)
        except UnavailableError as error:
            if "timed out" not in error.message.lower():
                exit_now(1)  # rank 0 has ended, and has said why: nothing is to stand after its words
            raise

    async def _rows(self, command: AnyCommand) -> None:
        assert isinstance(command, commands.Gather)
        if self._gatherer is None:
            self._gatherer = Gatherer(self._bus, self._watch, self._settings, self._advantage, self._member.learner.vocabulary)
        await self._member.gather(self._gatherer, command.record, command.entries)

    async def _work(self, command: AnyCommand) -> None:
        member = self._member
        match command:
            case commands.Make(folder=folder):
                await asyncio.to_thread(member.make, self._log, Path(folder))
            case commands.Restore(checkpoint=name):
                await asyncio.to_thread(member.restore, name)
            case commands.Outline():
                await asyncio.to_thread(member.outline)
            case commands.Adopt():
                member.adopt()
            case commands.Train(for_depth=depth):
                await asyncio.to_thread(member.train, depth)
            case commands.Snapshot(checkpoint=checkpoint, probe=probe):
                await asyncio.to_thread(member.snapshot, checkpoint, probe)

    async def _stage(self, command: AnyCommand) -> None:
        member = self._member
        match command:
            case commands.Save(name=name):
                await asyncio.to_thread(member.save, name)
            case commands.Upload(epoch=epoch, base=base, write_id=write_id, facts=facts):
                await asyncio.to_thread(member.upload, epoch, base, write_id, facts)
            case commands.Advance():
                member.advance()
