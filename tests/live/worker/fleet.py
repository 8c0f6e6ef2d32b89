"""Worker processes with synthetic engines around a real buffer; trainer, publisher and reward are scripted, their versions real.

The scripted ones follow the protocol, so that a whole run costs little more than its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from live.buffer.harness import Trainer, leading, seed
from towline.bus.client import Bus
from towline.bus.topology import ACKS, TRAJECTORY
from towline.config import Settings
from towline.contract.codec import digest, encode
from towline.contract.entries import VersionEntry
from towline.contract.outcome import Score
from towline.contract.policy import Committed, decode_ack
from towline.contract.trajectory import Trajectory, decode_trajectory
from towline.delta.state import ModelState, RawTensor, TensorSpec
from towline.local.toml import settings_toml
from towline.store import keys
from towline.store.log import Log
from towline.store.objects import ObjectStore
from towline.store.versions import VersionFacts, write_version


def state_at(depth: int) -> ModelState:
    return {"w": RawTensor(TensorSpec("w", "F32", (1,)), np.array([depth], "<f4").view(np.uint8))}


class RealVersions(Trainer):
    """A version a batch, with a delta that replicas can fetch and verify. `pace_seconds` is what a step takes at least."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: Settings) -> None:
        super().__init__(bus, objects, settings)
        self.objects, self.pace_seconds, self.depth = objects, 0.2, 0

    async def _commit(self, epoch: int, base: int, depth: int, cursor: int) -> int:
        await asyncio.sleep(self.pace_seconds)
        write_id = keys.new_write_id()
        manifest = await asyncio.to_thread(
            write_version, self.objects, self.run, epoch=epoch, base=base, write_id=write_id, base_state=state_at(depth - 1),
            new_state=state_at(depth), facts=VersionFacts(depth=depth, step=depth, batch_cursor=cursor),
        )  # fmt: skip
        entry = await self._append(
            lambda log, n, prev: VersionEntry(
                number=n, prev=prev, write_id=write_id, at=time.time(), epoch=epoch, base=base, base_digest=log.digest(base),
                depth=depth, skipped=(), representation="delta", codec=manifest.codec, folder=manifest.folder,
                manifest_digest=manifest.digest, layout_digest=manifest.layout_digest, model_digest=manifest.model_digest,
                density=manifest.density, wire_bytes=manifest.wire_bytes, model_bytes=manifest.model_bytes, step=depth,
                batch_cursor=cursor, checkpoint=None, probe=None, encode_seconds=0.0, upload_seconds=0.0, verify_seconds=0.0,
            )
        )  # fmt: skip
        hint = Committed(number=entry.number, epoch=epoch, write_id=entry.write_id)
        await self.bus.publish(self.bus.topology.policy("committed"), encode(hint))
        self.depth = depth
        return entry.number


@dataclass
class Fleet:
    """A run and its workers; `served` has the versions that each replica ever acknowledged, `delivered` the trajectories."""

    settings: Settings
    bus: Bus
    objects: ObjectStore
    folder: Path
    trainer: RealVersions
    workers: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    served: dict[str, dict[int, str]] = field(default_factory=dict)
    """Replica -> version -> the digest of the files that it was served from."""
    delivered: list[Trajectory] = field(default_factory=list)
    deaths: int = 0
    parts: list[asyncio.Task[None]] = field(default_factory=list)
    """Of those that are scripted."""

    async def start(self, replica: str) -> None:
        config = self.folder / "settings.toml"
        if not config.exists():
            config.write_text(settings_toml(self.settings))
        self.workers[replica] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "towline.rollout_worker", "--config", str(config), "--replica", replica,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

    async def kill(self, replica: str) -> None:
        """SIGKILL, and a new process in its place."""
        process = self.workers[replica]
        assert process.returncode is None, f"worker {replica} ended by itself with {process.returncode}"
        process.send_signal(signal.SIGKILL)
        await process.wait()
        self.deaths += 1
        await self.start(replica)

    async def until_depth(self, depth: int, seconds: float = 120.0) -> None:
        async with asyncio.timeout(seconds):
            while self.trainer.depth < depth:
                for part in self.parts:
                    if part.done():
                        part.result()
                await asyncio.sleep(0.05)

    async def ended(self) -> dict[str, int]:
        """Exit codes, once the run's end has ended them all."""
        async with asyncio.timeout(60.0):
            return {replica: await process.wait() for replica, process in self.workers.items()}

    async def watch(self) -> None:
        """Note who says that it serves what."""
        while True:
            for value in (await self.bus.kv(ACKS).items()).values():
                ack = decode_ack(value)
                noted = self.served.setdefault(ack.replica, {})
                noted.update(dict.fromkeys((row.version for row in ack.history), ""))
                noted[ack.version] = ack.files_digest
            await asyncio.sleep(0.1)

    async def score(self) -> None:
        """The reward service: a number for each trajectory."""
        run = self.settings.run.name
        async with contextlib.aclosing(self.bus.read(TRAJECTORY)) as messages:
            async for message in messages:
                one = decode_trajectory(message.data)
                self.delivered.append(one)
                score = Score(
                    run=run, lane=one.lane, group=one.group, sample=one.sample, group_size=one.group_size,
                    task_sequence=one.task_sequence, trajectory_sequence=message.sequence,
                    trajectory_digest=digest(message.data), reward=float(one.tokens.sum() % 7), verifier="scripted",
                    policy_tokens=one.policy_tokens, total_tokens=one.tokens.size, version_spans=one.version_spans,
                    finish=one.finish,
                )  # fmt: skip
                await self.bus.create(self.bus.topology.score(one.group, one.sample), encode(score))


@contextlib.asynccontextmanager
async def fleet(
    settings: Settings, bus: Bus, objects: ObjectStore, folder: Path, begin: asyncio.Event | None = None
) -> AsyncIterator[Fleet]:
    """A run that is under way, without workers yet; with `begin` its buffer leads once that is set."""
    await seed(objects, settings.run.name)
    trainer = RealVersions(bus, objects, settings)
    made = Fleet(settings, bus, objects, folder, trainer)
    async with contextlib.AsyncExitStack() as led:
        parts = [trainer.train(until_depth=settings.run.steps), made.score(), made.watch()]
        if begin is None:
            await led.enter_async_context(leading(settings, bus, objects))
        else:
            parts.append(_led_later(led, begin, settings, bus, objects))
        made.parts = [asyncio.create_task(part) for part in parts]
        try:
            yield made
        finally:
            for part in made.parts:
                part.cancel()
            await asyncio.gather(*made.parts, return_exceptions=True)
            for process in made.workers.values():
                if process.returncode is None:
                    process.kill()
                    await process.wait()


async def _led_later(
    led: contextlib.AsyncExitStack, begin: asyncio.Event, settings: Settings, bus: Bus, objects: ObjectStore
) -> None:
    await begin.wait()
    await led.enter_async_context(leading(settings, bus, objects))


async def read_log(objects: ObjectStore, run: str) -> Log:
    log = Log(objects, run)
    await asyncio.to_thread(log.refresh)
    return log
