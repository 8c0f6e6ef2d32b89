"""`towline replay --into trainer`: a second trainer, a run of its own, fed what another run recorded; their curves side by side.

The recorded run is only read. The new run has its own name, folder, bus and store; this process is its buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from towline.cli.source import is_bundle
from towline.errors import ConflictError, MissingError, UsageError

if TYPE_CHECKING:
    from towline.bundle.select import Filter
    from towline.bundle.source import Source
    from towline.bus.client import Bus
    from towline.config import Settings
    from towline.local.run_directory import RunDirectory
    from towline.replay.curve import Comparison
    from towline.replay.plan import Plan

SERVICES = ("trainer", "publisher")
FINISH_SECONDS = 30.0
COMPARED = ("trainer", "model", "buffer", "sampling", "run")
"""Sections in which a second trainer's settings may say something else."""
OWN = ("run.name", "run.directory", "model.source", "model.factory", "model.arguments", "buffer.max_staleness", "buffer.off_line",
       "trainer.mode")  # fmt: skip
"""What a replay sets by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Into:
    """What was asked for."""

    name: str | None
    config: Path | None
    changes: dict[str, Any]
    code: Path | None
    start: int
    until: int | None
    groups_per_batch: int | None
    """Put the recorded trajectories into batches of so many groups; None: the recorded batches."""
    wanted: Filter
    speed: float
    wait: Callable[[], Awaitable[None]] | None


async def into_trainer(source: Source, target: str, asked: Into) -> Comparison:
    """Train the new run to its end, and compare."""
    from towline.replay.plan import batched_anew, recorded

    if source.log.next_number == 0:
        raise MissingError(f"{source.where} has no versions yet: nothing was trained that could be replayed", code="log_empty")
    if asked.start not in source.log.lineage.versions():
        raise UsageError(
            f"--from {asked.start}: {source.where} has no such version; see `towline versions list`", code="version_missing"
        )
    before = source.settings
    directory = _directory(target, asked, before)
    plan = (
        await recorded(source, asked.start, asked.until, asked.wanted)
        if asked.groups_per_batch is None
        else await batched_anew(source, asked.groups_per_batch, asked.wanted)
    )
    if not plan.batches:
        raise MissingError(f"{source.where}: nothing to feed a trainer is left by --from, --until and the filters", code="empty")
    given = _settings(source, asked, directory, plan)
    directory.path.mkdir(parents=True, exist_ok=True)
    with directory.lock():
        return await _run(source, target, asked, directory, given, plan)


def _directory(target: str, asked: Into, before: Settings) -> RunDirectory:
    """A new run's, beside the recorded one's."""
    from towline.local.run_directory import RunDirectory, find_run

    name = asked.name or f"{before.run.name[:25]}-replay"
    if name == before.run.name:
        raise UsageError(f"--name {name} is the recorded run's own; a replay never touches it, give another", code="run_name")
    if is_bundle(target):
        parent = Path(asked.changes.get("run.directory", before.run.directory)).absolute()
    else:
        parent = find_run(target)[0].path.parent
    directory = RunDirectory(parent / name)
    if directory.path.exists():
        raise ConflictError(
            f"{directory.path} exists already: give another --name, or remove that folder if it's a replay of yours",
            code="run_exists",
        )
    return directory


def _settings(source: Source, asked: Into, directory: RunDirectory, plan: Plan) -> Settings:
    """The recorded run's, or those of --config, with --set on top; and what a replay needs."""
    from pydantic import ValidationError

    from towline.config import BusSettings, ServiceSettings, Settings, StoreSettings, load_settings
    from towline.config_loading import faults
    from towline.replay.again import changed
    from towline.replay.code import check_code
    from towline.replay.feeder import most_stale

    if asked.config is not None:
        given = load_settings(asked.config, asked.changes)
    else:
        plain = source.settings.model_copy(update={"bus": BusSettings(), "store": StoreSettings(), "service": ServiceSettings()})
        given = changed(plain, asked.changes)
        check_code(source, given, asked.changes, asked.code)
    tree = given.model_dump()
    over_stale = any(batch.over_stale for batch in plan.batches)
    # A trainer that is started again opens below its head: what it was fed then is staler, and off the line.
    room = given.buffer.max_staleness if over_stale else most_stale(source, plan) + len(plan.batches)
    # The learning rate's schedule is over run.steps: fewer batches than that leave it as it was.
    steps = max(given.run.steps, len(plan.batches))
    tree["run"] |= {"name": directory.name, "directory": str(directory.path.parent), "steps": steps}
    tree["model"] = {
        "source": f"{source.settings.run.name}@{asked.start}", "publish_dtype": source.settings.model.publish_dtype,
    }  # fmt: skip
    tree["buffer"] |= {"max_staleness": max(room, given.buffer.max_staleness), "off_line": "keep"}
    tree["trainer"] |= {"mode": "sync"}
    tree["service"] |= {"port": 0}
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise UsageError(f"the replay's settings: {faults(error, Settings)}", code="config") from None


async def _run(source: Source, target: str, asked: Into, directory: RunDirectory, given: Settings, plan: Plan) -> Comparison:
    from towline.access.identity import store_as
    from towline.access.roles import TRAINER
    from towline.config import StoreSettings
    from towline.local.cleanup import CLEAN, UP, start_guard
    from towline.local.run_directory import Processes
    from towline.local.supervisor import Supervisor
    from towline.store.log import Log
    from towline.store.objects import open_store

    server = None if given.bus.url else directory.nats()
    guard = await asyncio.to_thread(start_guard, directory)
    Processes(directory).record(UP, os.getpid())
    supervisor: Supervisor | None = None
    try:
        if server is not None:
            await asyncio.to_thread(server.start)
        store = given.store if given.store.url else StoreSettings(url=(directory.path / "store").absolute().as_uri())
        settings = given.model_copy(update={"bus": given.bus if server is None else server.settings(given.bus), "store": store})
        objects = open_store(store_as(settings.store, TRAINER))
        await asyncio.to_thread(objects.check)
        log = Log(objects, directory.name)
        await asyncio.to_thread(_seed, source, asked.start, objects, log)
        code = asked.code.absolute() if asked.code is not None else _code_folder(target)
        directory.save(settings, code / "run.toml")
        supervisor = Supervisor(directory, _specs(directory, settings, code), [] if server is None else [server], _say)
        feeder = await _feed(source, plan, settings, asked, log, supervisor)
        await asyncio.to_thread(log.refresh)
        return await asyncio.to_thread(_compare, source, target, directory, settings, plan, log, feeder.missing_rows)
    finally:
        if supervisor is not None:
            await supervisor.stop_services()
        if server is not None:
            await asyncio.to_thread(server.stop)
        Processes(directory).forget(UP)
        with contextlib.suppress(BrokenPipeError):
            await asyncio.to_thread(guard.communicate, CLEAN)


async def _feed(source: Source, plan: Plan, settings: Settings, asked: Into, log: Any, supervisor: Any) -> Any:
    """The trainer and the publisher up, the batches fed, both at their end."""
    from towline.replay.feeder import Feeder

    async with _buses(settings) as (control, samples, scores):
        wait = None
        if asked.wait is not None:
            hold = asked.wait

            async def wait(place: int) -> None:
                batch = plan.batches[place]
                print(f"next: batch {place + 1} of {len(plan.batches)}, {len(batch.rows)} samples; Enter", file=sys.stderr)
                await hold()

        feeder = Feeder(
            source, plan, control, samples, scores, log, settings.run.steps, speed=asked.speed, wait=wait
        )  # fmt: skip
        supervisor.start()
        feeding: asyncio.Task[None] = asyncio.create_task(feeder.run(), name="replay-feed")
        ending: asyncio.Task[None] = asyncio.create_task(supervisor.wait_done(), name="replay-services")
        try:
            await asyncio.wait([feeding, ending], return_when=asyncio.FIRST_COMPLETED)
            if ending.done() and not feeding.done():
                ending.result()  # what made a service give up
            await feeding
            supervisor.run_ended.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FINISH_SECONDS):
                    await ending
        finally:
            for task in (feeding, ending):
                task.cancel()
            await asyncio.gather(feeding, ending, return_exceptions=True)
    return feeder


@contextlib.asynccontextmanager
async def _buses(settings: Settings) -> AsyncIterator[tuple[Bus, Bus, Bus]]:
    """As the buffer, a worker and the reward service, whose places this process has."""
    from towline.access.identity import as_role
    from towline.access.roles import BUFFER, INIT, REWARD, WORKER
    from towline.bus.client import Bus
    from towline.store.blobs import Blobs
    from towline.store.objects import open_store

    name = settings.run.name
    async with contextlib.AsyncExitStack() as stack:

        async def connect(role: str) -> Bus:
            own = as_role(settings, role)
            blobs = Blobs(open_store(own.store), name)
            bus = await Bus.connect(own.bus, run=name, client_name=f"replay-{role}-{name}", blobs=blobs)
            stack.push_async_callback(bus.close)
            return bus

        maker = await connect(INIT)
        await maker.ensure()
        yield await connect(BUFFER), await connect(WORKER), await connect(REWARD)


def _specs(directory: RunDirectory, settings: Settings, code: Path) -> Any:
    from towline.local.services import service_specs

    return [spec for spec in service_specs(directory, settings, code / "run.toml") if spec.service in SERVICES]


def _seed(source: Source, start: int, objects: Any, log: Any) -> None:
    """Entry 0 of the new LOG: the recorded run's version `start`."""
    from towline.contract.entries import BaseEntry, VersionEntry
    from towline.store.base import base_files, seed_base_state
    from towline.store.materialize import materialize

    state = materialize(source.objects, source.log, start)
    entry = source.log.entry(start)
    probe = entry.probe if isinstance(entry, BaseEntry | VersionEntry) else None
    seed_base_state(
        objects, log, state, base_files(source.objects, source.log), f"{source.settings.run.name}@{start}", None, probe
    )


def _code_folder(target: str) -> Path:
    """Where the recorded run's own code lies; for a bundle, here."""
    from towline.local.run_directory import find_run

    if is_bundle(target):
        return Path.cwd()
    directory = find_run(target)[0]
    return Path(directory.source_path.read_text()).parent if directory.source_path.is_file() else Path.cwd()


def _compare(
    source: Source, target: str, directory: RunDirectory, settings: Settings, plan: Plan, log: Any, missing_rows: int
) -> Comparison:
    from towline.local.run_directory import find_run
    from towline.replay.curve import Comparison, Point, Weights, read_figures
    from towline.runtime.files import write_private
    from towline.store.objects import open_store

    recorded_log = None
    if not is_bundle(target):
        recorded_log = find_run(target)[0].log_path("trainer")
    figures, recorded = read_figures(directory.log_path("trainer")), read_figures(recorded_log)
    weights = Weights(source, open_store(settings.store), log)
    points = []
    for place, batch in enumerate(plan.batches):
        there = None if batch.recorded_depth is None else batch.recorded_depth + 1
        equal, gap = weights.compare(there, place + 1)
        points.append(
            Point(
                depth=place + 1,
                recorded_depth=there,
                figures=figures.get(place + 1, {}),
                recorded=recorded.get(there, {}) if there is not None else {},
                equal=equal,
                max_abs_diff=gap,
            )
        )
    comparison = Comparison(
        run=directory.name,
        of=source.settings.run.name,
        batches=len(plan.batches),
        rows=sum(1 for _ in plan.rows) - missing_rows,
        groups=plan.groups,
        missing_rows=missing_rows,
        changed=_changes(source.settings, settings),
        left_out=plan.left_out,
        points=points,
    )
    write_private(directory.path / "replay.json", json.dumps(comparison.plain(), indent=1, default=str) + "\n")
    return comparison


def _changes(before: Settings, after: Settings) -> dict[str, tuple[Any, Any]]:
    """What was set otherwise, but for what every replay sets."""
    was, now = before.model_dump(mode="json"), after.model_dump(mode="json")
    return {
        f"{section}.{key}": (was[section].get(key), value)
        for section in COMPARED
        for key, value in now[section].items()
        if value != was[section].get(key) and f"{section}.{key}" not in OWN
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
