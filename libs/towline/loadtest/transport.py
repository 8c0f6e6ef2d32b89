"""The hop worker -> durable -> trainer: Towline's bus beside the bare clients, on the same servers, in the same run, in turn.

Closed loop: rounds of a number of messages, the same window on both ends whatever the system. Open loop: a rate, or a profile
of rates, that doesn't wait for the system; a sweep of rates finds the knee.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import nats
import numpy as np

from towline.bus.client import Bus
from towline.bus.topology import TRAJECTORY
from towline.config import BusSettings, StoreSettings
from towline.errors import UnavailableError
from towline.loadtest.clients import Plan as ClientPlan
from towline.loadtest.ends import Plan, intended
from towline.loadtest.guard import NATS, S3, guarded
from towline.loadtest.result import Result, new_result
from towline.loadtest.scenario import Scenario
from towline.local.servers import NatsServer, S3Server

BARE_BYTES = 8 << 30
START_SECONDS = 30.0
KNEE_RATE_SHARE = 0.97
"""Below this share of what is offered the system doesn't keep up."""
KNEE_LATENCY = 10.0
"""Times the least rate's median: as good as not keeping up."""
LARGE_BYTES = 4 << 20
"""Payloads over this go to the store, so the bare client beside them is the S3 client."""
Say = Callable[[str], None]
End = Plan | ClientPlan


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement of one system."""

    rate: float
    """Messages a second, from the first send to the last receipt."""
    latencies: list[float]
    cpu_seconds: float
    twice: int
    late: float


class Transport:
    """`run` once; `folder` is where the servers live, where the scenario names none."""

    ends = "towline.loadtest.ends"
    """The program of an end."""

    def __init__(self, scenario: Scenario, folder: Path, run: str, say: Say) -> None:
        self._scenario, self._folder, self._run, self._say = scenario, folder / run, run, say

    async def run(self) -> Result:
        load, result = self._scenario.load, new_result(self._scenario)
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        loop.add_signal_handler(signal.SIGTERM, task.cancel)  # in order, so that no server is left
        async with self._served() as (bus, store):
            if load.rates or load.profile:
                await self._open_loop(result, bus, store)
            else:
                await self._closed_loop(result, bus, store)
        return result

    def systems(self, size: int) -> tuple[str, ...]:
        """Ours, and what stands beside it at this payload."""
        return ("towline", "s3" if size > LARGE_BYTES else "nats")

    async def _closed_loop(self, result: Result, bus: BusSettings, store: StoreSettings) -> None:
        load = self._scenario.load
        for size in load.payload_bytes:
            systems = self.systems(size)
            found: dict[str, list[Measured]] = {name: [] for name in systems}
            for turn in range(load.rounds + 1):
                # In turn, and which goes first in turn too: what the machine does meanwhile falls on both.
                for name in systems if turn % 2 else systems[::-1]:
                    messages = max(load.messages // (8 if turn == 0 else 1), load.window)
                    one = await self._measure(name, size, messages, [], bus, store)
                    if turn:  # the first is the warm-up
                        found[name].append(one)
                        self._say(f"{name} {size:,} bytes: {one.rate:,.4g} messages/s")
            title = f"{size}"
            for name in systems:
                rates = [one.rate for one in found[name]]
                result.metrics[f"{name}.{title}.messages_per_second"] = float(np.median(rates))
                result.metrics[f"{name}.{title}.bytes_per_second"] = float(np.median(rates)) * size
                result.metrics[f"{name}.{title}.cpu_seconds_per_message"] = sum(one.cpu_seconds for one in found[name]) / sum(
                    len(one.latencies) for one in found[name]
                )
                result.metrics[f"{name}.{title}.twice"] = float(sum(one.twice for one in found[name]))
                latencies = [value for one in found[name] for value in one.latencies]
                result.distribution(f"{name}.{title}.latency_seconds", latencies)
            ours, *others = systems
            for theirs in others:
                shares = [a.rate / b.rate for a, b in zip(found[ours], found[theirs], strict=True)]
                result.metrics[f"{ours}.{title}.share_of_{theirs}"] = float(np.median(shares))
            result.tables.setdefault("rounds", []).extend(
                {"payload": size, "system": name, "round": turn, "messages_per_second": one.rate}
                for name in systems
                for turn, one in enumerate(found[name])
            )

    async def _open_loop(self, result: Result, bus: BusSettings, store: StoreSettings) -> None:
        load, size = self._scenario.load, self._scenario.load.payload_bytes[0]
        await self._measure("towline", size, 4 * load.window, [], bus, store)
        if load.profile:
            one = await self._measure("towline", size, 0, list(load.profile), bus, store)
            result.distribution("burst.latency_seconds", one.latencies)
            result.metrics["offered_per_second"] = max(rate for _, rate in load.profile)
            result.metrics["burst.twice"] = float(one.twice)
            self._say(f"profile: p99 {result.metrics['burst.latency_seconds.p99'] * 1e3:.1f} ms")
            return
        columns: dict[str, list[float]] = {name: [] for name in ("offered", "achieved", "p50", "p90", "p99", "p99.9")}
        for rate in load.rates:
            one = await self._measure("towline", size, 0, [(load.measure_seconds, rate)], bus, store)
            quantiles = np.quantile(one.latencies, [0.5, 0.9, 0.99, 0.999])
            achieved = min(one.rate, rate)
            for name, value in zip(columns, (rate, achieved, *quantiles), strict=True):
                columns[name].append(float(value))
            result.distribution(f"rate.{rate:g}.latency_seconds", one.latencies)
            result.metrics[f"rate.{rate:g}.achieved_per_second"] = achieved
            self._say(f"offered {rate:,.0f}/s, achieved {achieved:,.0f}/s, p50 {quantiles[0] * 1e3:.2f} ms, "
                      f"p99 {quantiles[2] * 1e3:.2f} ms")  # fmt: skip
        result.series["rates"] = columns
        result.metrics["knee_per_second"] = knee(columns["offered"], columns["achieved"], columns["p50"])
        result.measured_seconds = load.measure_seconds

    async def _measure(
        self, system: str, size: int, messages: int, profile: list[tuple[float, float]], bus: BusSettings, store: StoreSettings
    ) -> Measured:
        """One measurement with fresh processes and empty streams."""
        load = self._scenario.load
        senders = load.senders
        window = load.window if profile else max(load.window // senders, 1)
        shared: dict[str, Any] = {
            "system": system, "payload_bytes": size, "window": window, "run": self._run, "bus": _plain(bus.model_dump()),
            "store": _plain(store.model_dump()), "stream": f"raw_{self._run}",
        }  # fmt: skip
        split = [(seconds, rate / senders) for seconds, rate in profile]
        each = len(intended(split)) if profile else messages // senders
        await self._clear(bus)
        plans = [Plan(role="consume", messages=each * senders, **shared)]
        plans += [Plan(role="produce", messages=each, profile=split, sender=number, **shared) for number in range(senders)]
        found = await together(self.ends, plans, START_SECONDS + load.most_seconds)
        await self._clear(bus)
        taken, sent = found[0], found[1:]
        began = min(one["began"] for one in sent)
        return Measured(
            rate=taken["received"] / (taken["last"] - began),
            latencies=taken["latencies"],
            cpu_seconds=sum(one["cpu_seconds"] for one in found),
            twice=taken["twice"],
            late=max(one["late"] for one in sent),
        )

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[tuple[BusSettings, StoreSettings]]:
        given = self._scenario.settings
        nats_server = None if given.bus.url else NatsServer(self._folder / NATS)
        large = max(self._scenario.load.payload_bytes) > LARGE_BYTES
        s3_server = S3Server(self._folder / S3) if large and not given.store.url else None
        servers = [server for server in (nats_server, s3_server) if server is not None]
        with guarded(self._folder):
            try:
                await asyncio.gather(*[asyncio.to_thread(server.start) for server in servers])
                bus = nats_server.settings(given.bus) if nats_server else given.bus
                store = s3_server.settings(given.store) if s3_server else given.store
                if not store.url:  # nothing is large enough to go there
                    store = store.model_copy(update={"url": (self._folder.absolute() / "store").as_uri()})
                await self._prepare(bus)
                yield bus, store
            finally:
                await asyncio.gather(*[asyncio.to_thread(server.stop) for server in servers], return_exceptions=True)

    async def _prepare(self, settings: BusSettings) -> None:
        bus = await Bus.connect(settings, run=self._run, client_name="hop")
        try:
            await bus.ensure()
        finally:
            await bus.close()
        client = await nats.connect(settings.url)
        try:
            config = nats.js.api.StreamConfig(
                name=f"raw_{self._run}",
                subjects=[f"raw.{self._run}.>"],
                max_bytes=BARE_BYTES,
                storage=nats.js.api.StorageType.FILE,
            )
            await client.jetstream().add_stream(config)
        finally:
            await client.close()

    async def _clear(self, settings: BusSettings) -> None:
        """Purge both streams, so that no measurement meets another's disk."""
        client = await nats.connect(settings.url)
        try:
            jetstream = client.jetstream()
            for stream in (f"raw_{self._run}", f"towline_{self._run}_{TRAJECTORY.key}"):
                await jetstream.purge_stream(stream)
        finally:
            await client.close()


def knee(offered: list[float], achieved: list[float], p50: list[float]) -> float:
    """The highest rate up to which every rate was kept up with; 0 where none was."""
    best = 0.0
    for rate, got, median in zip(offered, achieved, p50, strict=True):
        if got < KNEE_RATE_SHARE * rate or median > KNEE_LATENCY * p50[0]:
            break
        best = rate
    return best


async def together(program: str, plans: Sequence[End], seconds: float) -> list[dict[str, Any]]:
    """Start every end, let them go once all are ready, and have what they found. `UnavailableError` where one fails."""
    ends = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            limit=256 << 20,
        )
        for _ in plans
    ]  # fmt: skip
    try:
        async with asyncio.timeout(seconds):
            for end, plan in zip(ends, plans, strict=True):
                assert end.stdin is not None
                end.stdin.write(json.dumps(asdict(plan)).encode() + b"\n")
                await end.stdin.drain()
            for end, plan in zip(ends, plans, strict=True):
                assert end.stdout is not None
                if (await end.stdout.readline()).strip() != b"ready":
                    raise UnavailableError(f"the {plan.system} {plan.role} end didn't start; it said why above", code="hop")
            for end in ends:
                assert end.stdin is not None
                end.stdin.write(b"go\n")
                await end.stdin.drain()
            lines = await asyncio.gather(*[end.stdout.readline() for end in ends if end.stdout is not None])
    except TimeoutError:
        raise UnavailableError(f"a measurement took longer than {seconds:g} s (load.most_seconds)", code="hop_time") from None
    finally:
        for end in ends:
            if end.returncode is None:
                end.kill()
        await asyncio.gather(*[end.wait() for end in ends])
    for line, plan in zip(lines, plans, strict=True):
        if not line:
            raise UnavailableError(f"the {plan.system} {plan.role} end ended without a word; it said why above", code="hop")
    return [json.loads(line) for line in lines]


def _plain(tree: dict[str, Any]) -> dict[str, Any]:
    """For JSON; the addresses' secrets go to the ends by stdin alone."""
    return {key: value.get_secret_value() if hasattr(value, "get_secret_value") else value for key, value in tree.items()}
