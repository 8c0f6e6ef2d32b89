"""A world and workers in it, each with an engine of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from live.worker.world import World
from towline.bus.client import Bus
from towline.config import BusSettings, StoreSettings
from towline.engine.choice import make_engine
from towline.rollout_worker.worker import Worker
from towline.store.blobs import Blobs
from towline.store.objects import open_store


class Running:
    """A worker that runs beside the test."""

    def __init__(self, worker: Worker, bus: Bus) -> None:
        self.worker, self.bus = worker, bus
        self.ended: asyncio.Task[Literal["ended", "drained"]] = asyncio.create_task(worker.run())

    async def kill(self) -> None:
        """As a crash would: nothing is acked, nothing handed over."""
        self.ended.cancel()
        await asyncio.gather(self.ended, return_exceptions=True)


def blobs_of(folder: Path, run: str) -> Blobs:
    """In the world's store."""
    return Blobs(open_store(StoreSettings(url=(folder / "store").as_uri())), run)


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def world(bus_settings: BusSettings, tmp_path: Path, run_name: str) -> AsyncIterator[World]:
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test", blobs=blobs_of(tmp_path, run_name))
    await bus.ensure()
    yield World(bus, tmp_path, run_name)
    await bus.close()


@pytest.fixture
async def start(world: World, bus_settings: BusSettings) -> AsyncIterator[Start]:
    """Starts a worker; it's stopped after the test, and must not have broken."""
    running: list[Running] = []

    async def begin(name: str = "w", *, buffer: dict[str, Any] | None = None, **rollout: Any) -> Running:
        settings = world.settings(buffer=buffer, **rollout)
        bus = await Bus.connect(bus_settings, run=world.run, client_name=name, blobs=Blobs(world.objects, world.run))
        worker = Worker(
            name=name, settings=settings, bus=bus, objects=world.objects, engine=make_engine(settings.rollout),
            folder=world.folder / f"copy-{name}",
        )  # fmt: skip
        running.append(Running(worker, bus))
        return running[-1]

    yield begin
    for one in running:
        broken = one.ended.done() and not one.ended.cancelled() and one.ended.exception()
        await one.kill()
        await one.bus.close()
        assert not broken, broken
