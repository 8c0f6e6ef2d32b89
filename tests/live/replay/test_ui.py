"""`towline ui` shows a run that has ended, and its bundle: the same, and what the run's own records say."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path

import httpx

from live.replay.conftest import Ran
from support.waiting import until
from towline.bundle.folder import BundleSource
from towline.bundle.states import read_states
from towline.bus.topology import TRAJECTORY
from towline.contract.trajectory import decode_trajectory
from towline.report.history import read_history

PASSING = ("where", "at", "streams", "services", "state")


def _heed_interrupts() -> None:
    """Also where the tests run in the background of a shell, which has them ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Shown:
    """A `towline ui` of `target`, whose every answer is of what has been read whole."""

    def __init__(self, folder: Path, target: str) -> None:
        self._folder, self._target = folder, target

    async def __aenter__(self) -> httpx.AsyncClient:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "towline.cli.main", "ui", self._target,
            cwd=self._folder, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"},
            preexec_fn=_heed_interrupts,
        )  # fmt: skip
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            line = (await self._process.stdout.readline()).decode()
        found = re.search(r"(http://127\.0\.0\.1:\d+)/ui/", line)
        assert found is not None, line
        client = self._client = httpx.AsyncClient(base_url=found[1])

        async def read() -> bool:
            return (await client.get("/ui/api/overview")).json()["reading"] is None

        await until(read, 60.0)
        return client

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()
        self._process.send_signal(signal.SIGINT)
        async with asyncio.timeout(30):
            self.status = await self._process.wait()


async def all_rows(client: httpx.AsyncClient) -> list[dict]:
    rows, before = [], ""
    while True:
        page = (await client.get("/ui/api/trajectories", params={"limit": 100, "before": before})).json()
        rows += page["rows"]
        if page["next"] is None:
            return rows
        before = page["next"]


async def test_a_run_and_its_bundle_show_the_same_and_it_is_what_the_records_say(ran: Ran):
    shown: list[tuple] = []
    for target in ("small", str(ran.bundle)):
        view = Shown(ran.folder, target)
        async with view as client:
            overview = (await client.get("/ui/api/overview")).json()
            told = [(await client.get(f"/ui/api/{path}")).json() for path in ("curves", "versions", "dead")]
            rows = await all_rows(client)
        assert view.status == 130, "Ctrl-C ends it"
        assert overview["live"] is False
        shown.append(({key: overview[key] for key in overview if key not in PASSING}, told, rows))
    assert shown[0][0] == shown[1][0]
    assert shown[0][2] == shown[1][2]
    overview, (curves, versions, dead), rows = shown[1]
    summary = json.loads((ran.folder / "runs" / "small" / "summary.json").read_text())
    source = BundleSource.open(ran.bundle)
    history, states = await read_history(source), await read_states(source)
    assert overview["ended"] == "steps"
    assert overview["depth"] == summary["steps"] == len(curves["depth"])
    assert overview["trained_samples"] == summary["samples"]["trained"]
    assert (overview["reward_held_out_first"], overview["reward_held_out"]) == (summary["reward_first"], summary["reward_last"])
    assert curves["reward"] == [point.reward_mean for point in history.batches]
    assert len(versions["rows"]) == summary["versions_committed"] + 1
    assert dead["stages"].keys() == {"reward"}
    expected = Counter()
    async for message in source.read(TRAJECTORY):
        t = decode_trajectory(message.data)
        expected[states.state(source, t.group, t.sample, message.data, scored=True)] += 1
    listed = Counter(row["state"] for row in rows)
    assert listed == Counter(overview["states"])
    for state in ("trained", "evaluated", "skipped"):
        assert listed[state] == expected[state], state
    assert all(row["response"] is not None for row in rows), "the model's tokenizer is in the bundle"
