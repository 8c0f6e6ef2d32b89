"""The trainer's ranks as rank 0 leads them: it says what comes next, and does its own part of it. Alone there is nobody to tell.

The other ranks wait for a command for a bounded time only, so while rank 0 itself waits (for the lease, a batch, a commit) it
says that it's still there. A rank that is gone ends the crew: `UnavailableError` (rank_lost) from whatever is called next.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import structlog

from towline.config import Settings
from towline.contract.control import BatchRecord
from towline.errors import InvariantError, TowlineError, UnavailableError
from towline.learner.base import Learner, StepReport
from towline.learner.rows import Gathered
from towline.learner.world import RANK_LOST, World, join_world, place
from towline.store.checkpoints import CheckpointMeta
from towline.store.log import Log
from towline.store.manifest import FileRecord, Manifest, TensorRecord, VersionFacts
from towline.store.objects import ObjectStore
from towline.trainer import commands
from towline.trainer.commands import CHANNELS, ROWS, STAGE, WORK, AnyCommand, encode_command
from towline.trainer.member import Member, Snapshotted
from towline.trainer.rows import Gatherer

STILL_SHARE = 1 / 6
"""Of the ranks' time-out: how often rank 0 says that it's still there."""
STOP_SECONDS = 5.0
"""How long a channel that is busy is waited for before the ranks are left to find out by themselves."""

__all__ = ["RANK_LOST", "Crew"]
T = TypeVar("T")
log_line = structlog.get_logger(__name__)


class Crew:
    """`begin`, then everything else in threads (`asyncio.to_thread`), then `stop`. One call at a time on each channel."""

    def __init__(self, settings: Settings, objects: ObjectStore) -> None:
        self._settings = settings
        self._objects = objects
        self._size = place()[1]
        self._worlds: dict[str, World] = {name: World() for name in CHANNELS}
        self._locks = {name: threading.Lock() for name in CHANNELS}
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._lost: TowlineError | None = None
        self._member: Member | None = None
        self._gathering: asyncio.Task[Gathered] | None = None

    @property
    def size(self) -> int:
        return self._size

    @property
    def learner(self) -> Learner:
        return self._own.learner

    def begin(self) -> None:
        """Find the other ranks, in the background; they are told to wait from then on."""
        if self._size == 1:
            self._member = Member(self._settings, self._objects, self._worlds)
            self._ready.set()
            return
        threading.Thread(target=self._keep, name="towline-crew", daemon=True).start()

    def wait(self) -> None:
        """Until the ranks have found each other; `UnavailableError` where they don't."""
        self._ready.wait()
        self.check()

    def check(self) -> None:
        """`UnavailableError` where a rank was found to be gone while nothing was asked of it."""
        if self._lost is not None:
            raise self._lost

    def make(self, log: Log, folder: Path) -> None:
        self._do(WORK, commands.Make(folder=str(folder)), lambda own: own.make(log, folder))

    def restore(self, checkpoint: str) -> CheckpointMeta:
        return self._do(WORK, commands.Restore(checkpoint=checkpoint), lambda own: own.restore(checkpoint))

    def outline(self) -> list[TensorRecord]:
        """Every tensor of the learner's state, by name."""
        return sorted(self._do(WORK, commands.Outline(), lambda own: own.outline()), key=lambda record: record.name)

    def adopt(self) -> None:
        self._do(WORK, commands.Adopt(), lambda own: own.adopt())

    async def gather(self, gatherer: Gatherer, record: BatchRecord, entries: int) -> Gathered:
        """As `Member.gather`, on all ranks. Where the caller is cancelled it goes on to its end: the others are in it too."""
        task = asyncio.ensure_future(self._gather(gatherer, record, entries))
        self._gathering = task
        return await asyncio.shield(task)

    def train(self, for_depth: int) -> StepReport:
        return self._do(WORK, commands.Train(for_depth=for_depth), lambda own: own.train(for_depth))

    def snapshot(self, checkpoint: bool, probe: tuple[int, ...]) -> Snapshotted:
        """Rank 0's part; the others keep theirs."""
        command = commands.Snapshot(checkpoint=checkpoint, probe=probe)
        return self._do(WORK, command, lambda own: own.snapshot(checkpoint, probe))

    def save(self, name: str) -> list[FileRecord]:
        return self._do(STAGE, commands.Save(name=name), lambda own: own.save(name))

    def upload(self, epoch: int, base: int, write_id: str, facts: VersionFacts) -> Manifest:
        command = commands.Upload(epoch=epoch, base=base, write_id=write_id, facts=facts)
        manifest = self._do(STAGE, command, lambda own: own.upload(epoch, base, write_id, facts))
        assert manifest is not None
        return manifest

    def advance(self) -> None:
        self._do(STAGE, commands.Advance(), lambda own: own.advance())

    def stop(self) -> None:
        """Let the other ranks go, each channel once it's idle. Safe to call twice, and after an error."""
        if self._size == 1 or self._stopping.is_set():
            return
        self._stopping.set()
        if self._member is None or self._lost is not None:
            return
        for channel in CHANNELS:
            if self._locks[channel].acquire(timeout=STOP_SECONDS):
                with contextlib.suppress(UnavailableError):
                    self._tell(channel, commands.Stop())
                self._locks[channel].release()

    async def _gather(self, gatherer: Gatherer, record: BatchRecord, entries: int) -> Gathered:
        await asyncio.to_thread(self._locks[ROWS].acquire)
        try:
            await asyncio.to_thread(self._tell, ROWS, commands.Gather(record=record, entries=entries))
            return await self._own.gather(gatherer, record, entries)
        finally:
            self._locks[ROWS].release()

    @property
    def _own(self) -> Member:
        if self._member is None:
            raise InvariantError("the ranks haven't found each other yet", code="command")
        return self._member

    def _do(self, channel: str, command: AnyCommand, part: Callable[[Member], T]) -> T:
        with self._locks[channel]:
            self._tell(channel, command)
            return part(self._own)

    def _tell(self, channel: str, command: AnyCommand) -> None:
        self.check()
        if self._size > 1:
            self._worlds[channel].broadcast(encode_command(command))

    def _keep(self) -> None:
        """Join the world, then say `still` on each idle channel for as long as the process lives."""
        try:
            trainer = self._settings.trainer
            world = join_world(trainer.device, trainer.rank_timeout_seconds)
            self._worlds = {name: world.channel() for name in CHANNELS}
            self._member = Member(self._settings, self._objects, self._worlds)
            self._ready.set()
            while not self._stopping.wait(world.timeout_seconds * STILL_SHARE):
                for channel in CHANNELS:
                    with self._idle(channel) as idle:
                        if idle and not self._stopping.is_set():
                            self._tell(channel, commands.Still())
        except TowlineError as error:
            log_line.error("a rank is lost", reason=error.message)
            self._lost = error
        finally:
            self._ready.set()

    @contextlib.contextmanager
    def _idle(self, channel: str) -> Iterator[bool]:
        """Whether nobody uses the channel; it's held inside if so."""
        held = self._locks[channel].acquire(blocking=False)
        try:
            yield held
        finally:
            if held:
                self._locks[channel].release()
