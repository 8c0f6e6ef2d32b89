"""A load test from its scenario to its verdict: repetitions, sweeps, results on disk."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from towline.bus.topology import RUN_NAME
from towline.errors import UsageError
from towline.loadtest.drive import Drive
from towline.loadtest.gateway import GatewayClients, GatewayDrive
from towline.loadtest.result import Result
from towline.loadtest.scenario import Scenario
from towline.loadtest.transport import Transport

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Campaign:
    """What came of a scenario: its results, each as result-NNN.json in `folder`."""

    folder: Path
    results: list[Result]

    @property
    def failed(self) -> list[str]:
        return [line for result in self.results for line in result.failed]


async def conduct(scenario: Scenario, folder: Path, say: Say, *, repetitions: int | None = None, keep: bool = False) -> Campaign:
    """Run it all. Each result is on disk as soon as it stands; `TowlineError` where a run couldn't be carried through."""
    await asyncio.to_thread(_make, folder)
    results: list[Result] = []
    planned = [one for one in _sweep(scenario) for _ in range(repetitions or scenario.load.repetitions)]
    for number, one in enumerate(planned):
        if len(planned) > 1:
            say(f"run {number + 1} of {len(planned)}" + (f": {one.load.workers} workers" if scenario.load.sweep else ""))
        result = await _run(one, folder, say, keep)
        result.judge(one)
        result.write(folder / f"result-{number:03d}.json")
        results.append(result)
    return Campaign(folder, results)


def _make(folder: Path) -> None:
    if folder.exists() and any(folder.glob("result-*.json")):
        raise UsageError(f"{folder} has results already; name another folder with --output", code="output")
    folder.mkdir(parents=True, exist_ok=True)


def _sweep(scenario: Scenario) -> list[Scenario]:
    """A scenario for each number of workers. Batches grow with them, so that every run takes as many steps in about as much time:
    the rate of steps and versions stays what it is, and what is seen is the fleet's."""
    return [_with_workers(scenario, workers) for workers in scenario.load.sweep] or [scenario]


def _with_workers(scenario: Scenario, workers: int) -> Scenario:
    buffer, least = scenario.settings.buffer, min(scenario.load.sweep)
    groups = buffer.groups_per_batch * workers // least
    settings = scenario.settings.model_copy(update={"buffer": buffer.model_copy(update={"groups_per_batch": groups})})
    load = scenario.load.model_copy(update={"workers": workers, "sweep": ()})
    return scenario.model_copy(update={"load": load, "settings": settings})


async def _run(scenario: Scenario, folder: Path, say: Say, keep: bool) -> Result:
    name = run_name(scenario.settings.run.name)
    if scenario.load.kind == "gateway":
        make = GatewayClients if scenario.load.gateway.urls else GatewayDrive
        return await make(scenario, folder, name, say, keep=keep).run()
    if scenario.load.kind == "run":
        return await Drive(scenario, folder, name, say, keep=keep).run()
    try:
        return await Transport(scenario, folder, name, say).run()
    finally:
        if not keep:
            await asyncio.to_thread(shutil.rmtree, folder / name, ignore_errors=True)


def run_name(base: str) -> str:
    """A run of its own each time, on whatever bus and store: streams and objects of another must not be taken for its."""
    name = f"{base[:19]}-{time.strftime('%H%M%S')}-{secrets.token_hex(2)}"
    if not RUN_NAME.fullmatch(name):
        raise UsageError(f"run.name {base!r}: use 1 to 32 of a-z, 0-9 and '-'", code="run_name")
    return name
