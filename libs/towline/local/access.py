"""A run's bus and store for a tool in another shell, whether `towline up` runs at the moment or not."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from towline.access.identity import as_role
from towline.access.roles import OPERATOR
from towline.bus.client import Bus
from towline.config import Settings
from towline.errors import ConflictError, MissingError, UsageError
from towline.local.daemon import Daemon
from towline.local.run_directory import RunDirectory
from towline.local.supervisor import SERVERS_SECONDS
from towline.store.blobs import Blobs
from towline.store.objects import ObjectStore, open_store

PATIENCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Access:
    """An open run."""

    settings: Settings
    bus: Bus
    objects: ObjectStore


@contextlib.asynccontextmanager
async def open_run(directory: RunDirectory, settings: Settings, role: str = OPERATOR) -> AsyncIterator[Access]:
    """Bus and store of the run; its own servers are started for the time being where they are down."""
    with _reachable(directory, as_role(settings, role), bus=True) as reachable:
        objects = open_store(reachable.store)
        name = settings.run.name
        bus = await Bus.connect(
            reachable.bus, run=name, client_name=f"cli-{name}", blobs=Blobs(objects, name), patience_seconds=PATIENCE_SECONDS
        )
        try:
            yield Access(reachable, bus, objects)
        finally:
            await bus.close()


@contextlib.contextmanager
def open_objects(directory: RunDirectory, settings: Settings, role: str = OPERATOR) -> Iterator[ObjectStore]:
    """The run's store alone."""
    with _reachable(directory, as_role(settings, role), bus=False) as reachable:
        yield open_store(reachable.store)


@contextlib.contextmanager
def _reachable(directory: RunDirectory, settings: Settings, *, bus: bool) -> Iterator[Settings]:
    """The settings with addresses that answer. Own servers that are down are started, and stopped again afterwards; so long
    the run's lock is held, so that no `towline up` builds on servers that are about to stop."""
    if not settings.store.url or (bus and not settings.bus.url):
        raise UsageError(
            f"run {settings.run.name} was never up here and its settings name no bus or store; `towline up` it, or set bus.url "
            "and store.url",
            code="run_missing",
        )
    nats, s3 = directory.nats(), directory.s3()
    own_bus = bus and _is(lambda: nats.url == settings.bus.url)
    own_store = _is(lambda: s3.endpoint == settings.store.endpoint)
    down: list[Daemon] = [server for server, own in ((nats, own_bus), (s3, own_store)) if own and server.pid is None]
    with contextlib.ExitStack() as stack:
        if down:
            try:
                stack.enter_context(directory.lock())
            except ConflictError:
                down = []  # `towline up` is about to start them
        for server in down:
            server.stop_seconds = SERVERS_SECONDS
            stack.callback(server.stop)
            server.start()
        # Another port, where the former one was taken meanwhile.
        yield settings.model_copy(
            update={
                "bus": nats.settings(settings.bus) if own_bus else settings.bus,
                "store": s3.settings(settings.store) if own_store else settings.store,
            }
        )


def own_bus_is_down(directory: RunDirectory, settings: Settings) -> bool:
    """Whether the run's bus is the server that `towline up` starts for it, and isn't running."""
    nats = directory.nats()
    return _is(lambda: nats.url == settings.bus.url) and nats.pid is None


def _is(question: Callable[[], bool]) -> bool:
    """False where no such server was ever started here."""
    try:
        return question()
    except MissingError:
        return False
