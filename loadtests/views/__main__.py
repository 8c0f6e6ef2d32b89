"""What watching a run costs it: python -m loadtests.views [--rate N] [--rounds N] [--seconds N] [--check]; one JSON object.

Trajectories at `rate` a second go through a real buffer on a real nats-server. Five arms take turns in windows of `seconds`, in
an order drawn anew each round: `plain`; `screens` (`towline top` and the live view of `towline up`); `web` (`towline ui` with a
browser's page open); `readers` (`towline trace` of one sample every few seconds, by a process that is up); `traced` (spans at
ratio 0.01, exported over OTLP). Each round compares with its own `plain`.

rate                 trajectories a second, durable and scored, by arm
cpu, whole_cpu       CPU seconds of buffer, rollouts and nats-server a thousand samples, by arm; and the views' own besides
slowdown             1 - rate / plain's rate: the median of the rounds, with their quartiles (target: at most 0.03)
cpu_ratio, whole_cpu_ratio   the same of cpu and of whole_cpu, over plain's
cores                of a view's processes: CPU seconds a second
command_cpu_seconds  of one `towline trace` as a command, start of the interpreter and imports included
call_off_nanoseconds, traced_sample_microseconds   this process's time for one call where tracing is off, and for one sample's
                     twelve spans where it is traced
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import timeit
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
from loadtests.views.parts import Rollouts, state_at
from loadtests.views.watching import Readers

from towline import spans
from towline.bus.client import Bus
from towline.config import BusSettings, Settings, StoreSettings, TelemetrySettings
from towline.local.servers import NatsServer
from towline.local.toml import settings_toml
from towline.runtime.tracing import begin
from towline.store.base import seed_base_state
from towline.store.log import Log
from towline.store.objects import open_store

ARMS = ("plain", "screens", "web", "readers", "traced")
VIEWS = ("screens", "web", "readers")
RATIO, MOST_SLOWDOWN = 0.01, 0.03
SETTLE_SECONDS = 0.5
"""Left out at the beginning of each window."""
ROOT = Path(__file__).parents[2]


def settings_for(run: str, bus: BusSettings, store: StoreSettings, rate: float) -> Settings:
    """Room for two seconds of samples, in batches of half a second."""
    groups = max(int(rate / 16), 1)
    return Settings.model_validate(
        {
            "run": {"name": run, "steps": 1_000_000}, "bus": bus, "store": store, "model": {"source": "scripted"},
            "prompts": {"source": "towline.loadtest.task:prompts"}, "sampling": {"max_tokens": 1024},
            "buffer": {"group_size": 8, "groups_per_batch": groups, "max_staleness": 4}, "eval": {"every": 0},
            "reward": {"function": "nowhere:reward"}, "telemetry": {"sample_ratio": RATIO}, "service": {"log_level": "error"},
        }
    )  # fmt: skip


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list[int]]]:
    """Takes OTLP and throws it away; its URL, and the bytes of each request."""
    taken: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", taken
    finally:
        server.shutdown()


class Child:
    """One of the processes, and what it answers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, name: str, *arguments: str) -> Child:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "loadtests.views.process",
                name,
                *arguments,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )

    def turn(self, arm: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{arm}\n".encode())

    async def counts(self) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"count\n")
        async with asyncio.timeout(30):
            while True:
                line = await self._process.stdout.readline()
                if not line:
                    raise RuntimeError("a process of the benchmark ended: see its messages above")
                with contextlib.suppress(json.JSONDecodeError):
                    found: dict[str, float] = json.loads(line)
                    return found

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.wait()


async def measure(rate: float, rounds: int, seconds: float, trace_seconds: float, seed: int) -> dict[str, Any]:
    order = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary, collector() as (endpoint, taken):
        folder = Path(temporary)
        server = NatsServer(folder / "nats", max_store_bytes=16 << 30)
        await asyncio.to_thread(server.start)
        children: list[Child] = []
        try:
            settings = settings_for(
                "views", server.settings(BusSettings(budget_bytes=12 << 30)), StoreSettings(url=(folder / "store").as_uri()), rate
            )
            await _prepare(settings)
            config = folder / "run.toml"
            config.write_text(settings_toml(settings))
            for name in ("buffer", "rollouts", *VIEWS):
                children.append(
                    await Child.start(name, str(config), endpoint, f"--rate={rate}", f"--trace-seconds={trace_seconds}")
                )
            assert server.pid is not None
            nats = psutil.Process(server.pid)
            await _until_it_runs(children[0])
            windows = [await _round(children, nats, order.sample(ARMS, len(ARMS)), seconds) for _ in range(rounds)]
            views = {name: await child.counts() for name, child in zip(VIEWS, children[2:], strict=True)}
            views["readers"] |= await _trace_command(views["readers"], config)
        finally:
            for child in children:
                await child.stop()
            await asyncio.to_thread(server.stop)
        return _summary(windows, views, taken, rate, seconds) | await asyncio.to_thread(span_cost, endpoint)


async def _prepare(settings: Settings) -> None:
    objects = open_store(settings.store)
    bus = await Bus.connect(settings.bus, run=settings.run.name, client_name="bench")
    await bus.ensure()
    await bus.close()
    files = {"config.json": b'{"eos_token_id": [2]}'}
    await asyncio.to_thread(seed_base_state, objects, Log(objects, settings.run.name), state_at(0), files, "m", None, None)


async def _until_it_runs(buffer: Child) -> None:
    async with asyncio.timeout(120):
        while (await buffer.counts()).get("batched", 0.0) == 0:  # noqa: ASYNC110  another process's
            await asyncio.sleep(0.5)
    await asyncio.sleep(2.0)


async def _until_it_has_read(web: Child) -> None:
    async with asyncio.timeout(60):
        while not (await web.counts())["ready"]:  # noqa: ASYNC110  another process's
            await asyncio.sleep(0.1)


async def _trace_command(readers: Mapping[str, float], config: Path) -> dict[str, float]:
    """CPU seconds of a whole `towline trace`, interpreter and imports included, of the sample that was traced last."""
    sample = f"{readers['group']:.0f}.{readers['sample']:.0f}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "towline.cli.main", "trace", str(config), sample, "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    if await process.wait():
        raise RuntimeError("towline trace failed: see its message above")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"command_cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


async def _round(
    children: Sequence[Child], nats: psutil.Process, arms: Sequence[str], seconds: float
) -> dict[str, dict[str, float]]:
    """Each arm's rate and CPU in one window."""
    found = {}
    for arm in arms:
        for child in children:
            child.turn(arm)
        await asyncio.sleep(SETTLE_SECONDS)
        if arm == "web":
            await _until_it_has_read(children[2 + VIEWS.index("web")])
        before, began = await _look(children, nats), asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        after, ended = await _look(children, nats), asyncio.get_running_loop().time()
        samples = after["published"] - before["published"]
        found[arm] = {
            "rate": samples / (ended - began),
            "batched_rate": (after["batched"] - before["batched"]) / (ended - began),
            "cpu": 1000 * (after["cpu"] - before["cpu"]) / max(samples, 1.0),
            "whole_cpu": 1000 * (after["cpu"] + after["views_cpu"] - before["cpu"] - before["views_cpu"]) / max(samples, 1.0),
            "views_cores": (after["views_cpu"] - before["views_cpu"]) / (ended - began),
        }
    for child in children:
        child.turn("plain")
    return found


async def _look(children: Sequence[Child], nats: psutil.Process) -> dict[str, float]:
    buffer, rollouts, *views = [await child.counts() for child in children]
    times = nats.cpu_times()
    return {
        "published": rollouts["published"],
        "batched": buffer["batched"],
        "cpu": buffer["cpu_seconds"] + rollouts["cpu_seconds"] + times.user + times.system,
        "views_cpu": sum(view["cpu_seconds"] for view in views),
    }


def _summary(
    windows: list[dict[str, dict[str, float]]], views: dict[str, dict[str, float]], taken: list[int], rate: float, seconds: float
) -> dict[str, Any]:
    found: dict[str, Any] = {"offered": rate, "rounds": len(windows), "window_seconds": seconds}
    for key in ("rate", "cpu", "whole_cpu"):
        found[key] = {arm: round(statistics.median(window[arm][key] for window in windows), 3) for arm in ARMS}
    for arm in ARMS[1:]:
        found[arm] = {
            "slowdown": _spread([1 - window[arm]["rate"] / window["plain"]["rate"] for window in windows]),
            "cpu_ratio": _spread([window[arm]["cpu"] / window["plain"]["cpu"] for window in windows]),
            "whole_cpu_ratio": _spread([window[arm]["whole_cpu"] / window["plain"]["whole_cpu"] for window in windows]),
        }
        if arm in VIEWS:
            found[arm]["cores"] = _spread([window[arm]["views_cores"] for window in windows])
    active = seconds * len(windows)
    readers = views["readers"]
    found["screens"]["looks_per_second"] = round(views["screens"]["frames"] / active, 2)
    found["web"]["answers_per_second"] = round(views["web"]["answers"] / active, 2)
    found["readers"] |= {
        "traces": int(readers["traces"]),
        "trace_seconds_mean": round(readers["trace_seconds"] / max(readers["traces"], 1), 3),
        "command_cpu_seconds": round(readers["command_cpu_seconds"], 2),
    }
    found["traced"] |= {"requests": len(taken), "megabytes": round(sum(taken) / 1e6, 2)}
    return found


def span_cost(endpoint: str, repeats: int = 3000) -> dict[str, float]:
    """One call where nothing is traced, and one sample's twelve spans where it is, in this process."""
    off = min(timeit.repeat(lambda: spans.follow("task", None), number=100_000, repeat=3)) / 100_000
    tracing = begin(TelemetrySettings(endpoint=endpoint, sample_ratio=1.0), service="bench", replica="0", run="r")
    assert tracing is not None
    headers = spans.Context(1, 2).headers

    def sample() -> None:
        with spans.follow("task", headers):
            for _ in range(11):
                with spans.child("part") as span:
                    span.set(group=1, sample=2, tokens=512)

    on = min(timeit.repeat(sample, number=repeats // 3, repeat=3)) / (repeats // 3)
    tracing.close()
    return {"call_off_nanoseconds": round(1e9 * off, 1), "traced_sample_microseconds": round(1e6 * on, 1)}


def _spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {"median": round(middle, 4), "quartile_low": round(low, 4), "quartile_high": round(high, 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=Rollouts.rate, help="trajectories a second that are offered")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each window")
    parser.add_argument("--trace-seconds", type=float, default=Readers.trace_seconds, help="between two traces of one reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help=f"fail where an arm is slower by more than {MOST_SLOWDOWN:.0%}%")
    given = parser.parse_args()
    found = asyncio.run(measure(given.rate, given.rounds, given.seconds, given.trace_seconds, given.seed))
    print(json.dumps(found))
    return int(given.check and any(found[arm]["slowdown"]["median"] > MOST_SLOWDOWN for arm in ARMS[1:]))


if __name__ == "__main__":
    sys.exit(main())
