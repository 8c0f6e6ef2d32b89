"""The parts of a gateway's load test, one after the other, and what each says.

closed: the closed loop, rounds in turn with an engine behind nothing but HTTP (`bare`): the same clients, seeds and so lengths.
open: a sweep of rates to the knee. sessions: conversations of several turns, opened or claimed. tenants: each with its clients,
all at once. grpc: the closed loop again. idle: the closed loop beside streams that say nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import numpy as np

from towline.errors import UnavailableError
from towline.loadtest.client_figures import OK, Call, fairness, kept_up, tell
from towline.loadtest.clients import Plan
from towline.loadtest.result import Result
from towline.loadtest.scenario import Scenario
from towline.loadtest.transport import START_SECONDS, knee, together
from towline.loadtest.usage import Usage

FIRST_SECONDS = 0.5
"""Requests of the gateway's first half second are the cold ones."""
PROGRAM = "towline.loadtest.clients"
SWEEP = ("offered", "achieved", "p50", "p90", "p99", "p99.9", "ttft_p50", "ttft_p99")
"""Columns of the sweep; p… of the latency."""


class Part:
    """What one part's clients saw."""

    def __init__(self, found: list[dict[str, Any]], seconds: float) -> None:
        self.began, self.seconds = min(one["began"] for one in found), seconds
        self.ended = max(one["ended"] for one in found)
        self.found = found
        self.cpu_seconds = sum(one["cpu_seconds"] for one in found)
        self.calls = [Call(*call) for one in found for call in one["calls"]]

    @property
    def good(self) -> int:
        return sum(call.outcome == OK for call in self.calls)


class Parts:
    """`run`, then `tell`. `token_of` each tenant; `plain`: the tenant of all but the tenants' part, "" where nobody needs one."""

    def __init__(
        self, scenario: Scenario, http: list[str], grpc: list[str], model: str, token_of: dict[str, str], plain: str,
        usage: Usage | None, say: Callable[[str], None], note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._scenario, self._load, self._mine = scenario, scenario.load, scenario.load.gateway
        self._http, self._grpc, self._model, self._tokens, self._plain = http, grpc, model, token_of, plain
        self._usage, self._say, self._note = usage, say, note
        self._told: list[Callable[[Result], None]] = []

    async def run(self) -> None:
        mine = self._mine
        if self._load.warm_up_seconds:
            part = await self._measure("warm-up", seconds=self._load.warm_up_seconds, seed=-1)
            first = [call.first - call.meant for call in part.calls if call.first and call.meant < part.began + FIRST_SECONDS]
            self._told.append(lambda result: result.distribution("cold.ttft_seconds", first))
        if mine.rounds:
            await self._closed()
        if mine.rates:
            await self._open()
        if mine.sessions:
            await self._sessions()
        if mine.tenants:
            await self._tenants()
        if mine.grpc and self._grpc:
            await self._simple("grpc", grpc=self._grpc)
        if mine.idle_streams:
            await self._idle()

    def tell(self, result: Result) -> None:
        """Everything into the result."""
        for one in self._told:
            one(result)
        result.measured_seconds = self._load.measure_seconds
        versions = {int(name) for name in result.series.get("versions", {}).get("versions", [])}
        result.metrics["versions_seen"] = float(len(versions))

    # The parts

    async def _closed(self) -> None:
        found: dict[str, list[Part]] = {"closed": [], "bare": []}
        async with self._bare() as bare:
            for turn in range(self._mine.rounds):
                systems = [("closed", self._http), *([("bare", [bare])] if bare else [])]
                for name, urls in systems if turn % 2 else systems[::-1]:
                    part = await self._measure(name, urls=urls, seed=turn, model=self._model)
                    found[name].append(part)
                    self._say(f"{name}: {part.good / part.seconds:,.4g} requests/s, p50 {_p50(part) * 1e3:.1f} ms")
        self._told.append(lambda result: _closed_figures(result, found, self._usage))
        for part in found["closed"]:
            self._seen(part)

    async def _open(self) -> None:
        columns: dict[str, list[float]] = {name: [] for name in SWEEP}
        parts: dict[float, Part] = {}
        for number, rate in enumerate(self._mine.rates):
            part = parts[rate] = await self._measure(
                f"open-{rate:g}", mode="open", rate=rate / self._load.senders, seed=100 + number
            )
            good = [call for call in part.calls if call.outcome == OK]
            latencies = np.quantile([call.latency for call in good] or [0.0], [0.5, 0.9, 0.99, 0.999])
            ttft = np.quantile([call.first - call.meant for call in good if call.first] or [0.0], [0.5, 0.99])
            achieved = min(kept_up(part.calls, part.began, part.seconds), rate)
            for name, value in zip(SWEEP, (rate, achieved, *latencies, *ttft), strict=True):
                columns[name].append(float(value))
            self._say(f"offered {rate:,.0f}/s, achieved {achieved:,.1f}/s, p50 {latencies[0] * 1e3:.0f} ms, p99 "
                      f"{latencies[2] * 1e3:.0f} ms, TTFT p50 {ttft[0] * 1e3:.0f} ms")  # fmt: skip
            self._seen(part)

        def told(result: Result) -> None:
            result.series["rates"] = columns
            result.metrics["knee_per_second"] = knee(columns["offered"], columns["achieved"], columns["p50"])
            for rate, part in parts.items():
                tell(result, f"rate.{rate:g}", part.calls, part.began, part.seconds)
                self._costs(result, f"rate.{rate:g}", part)

        self._told.append(told)

    async def _sessions(self) -> None:
        part = await self._measure("sessions", mode="sessions", clients=self._mine.sessions, seed=200)
        kinds = sorted({call.kind for call in part.calls})
        counts = {name: sum(one["sessions"][name] for one in part.found) for name in ("finished", "unclaimed")}
        self._say(f"sessions: {counts['finished']} finished, {part.good / part.seconds:,.4g} calls/s")
        self._seen(part)

        def told(result: Result) -> None:
            for kind in kinds:
                calls = [call for call in part.calls if call.kind == kind]
                tell(result, f"sessions.{kind}", calls, part.began, part.seconds)
            for name, count in counts.items():
                result.metrics[f"sessions.{name}"] = float(count)
            self._costs(result, "sessions", part)

        self._told.append(told)

    async def _tenants(self) -> None:
        clients = self._mine.tenants
        lanes = [(name, self._tokens[name], count) for name, count in clients.items()]
        part = await self._measure("tenants", lanes=lanes, seed=300)
        self._say(f"tenants: {part.good / part.seconds:,.4g} requests/s")
        self._seen(part)
        self._told.append(lambda result: fairness(result, part.calls, clients, part.began, part.seconds))

    async def _simple(self, name: str, **more: Any) -> None:
        part = await self._measure(name, seed=400, **more)
        self._say(f"{name}: {part.good / part.seconds:,.4g} requests/s, p50 {_p50(part) * 1e3:.1f} ms")
        self._seen(part)

        def told(result: Result) -> None:
            tell(result, name, part.calls, part.began, part.seconds)
            self._costs(result, name, part)

        self._told.append(told)

    async def _idle(self) -> None:
        before = time.time()
        part = await self._measure("idle", idle=self._mine.idle_streams, seed=0)
        idle = [one["idle"] for one in part.found]
        alive, asked = (sum(one[name] for one in idle) for name in ("alive", "asked"))
        since = max(one["since"] for one in idle)
        self._say(f"idle: {alive} of {asked} streams open to the end; beside them {part.good / part.seconds:,.4g} requests/s, "
                  f"p50 {_p50(part) * 1e3:.1f} ms")  # fmt: skip
        self._seen(part)

        def told(result: Result) -> None:
            tell(result, "idle", part.calls, part.began, part.seconds)
            self._costs(result, "idle", part)
            result.metrics["idle.streams"], result.metrics["idle.asked"] = float(alive), float(asked)
            if (usage := self._usage) is not None:
                grown = usage.rss_bytes("gateway", part.began) - usage.rss_bytes("gateway", before)
                result.metrics["idle.gateway_bytes_per_stream"] = grown / max(asked, 1)
                alone = usage.cpu_seconds("gateway", since, part.began) / max(part.began - since, 1e-9)
                result.metrics["idle.gateway_cores_alone"] = alone

        self._told.append(told)

    # What they share

    async def _measure(
        self, name: str, *, seed: int, mode: Any = "closed", urls: list[str] | None = None, clients: int = 0,
        lanes: list[tuple[str, str, int]] | None = None, seconds: float = 0.0, rate: float = 0.0, idle: int = 0,
        grpc: list[str] | None = None, model: str = "",
    ) -> Part:  # fmt: skip
        """One part, by `load.senders` processes that share its clients."""
        mine, load, senders = self._mine, self._load, self._load.senders
        lanes = lanes or [(self._plain or "-", self._tokens.get(self._plain, ""), clients or mine.clients)]
        plan = Plan(
            system=name, mode=mode, urls=urls or self._http, grpc=grpc or [], model=model or self._model, lanes=[],
            seconds=seconds or load.measure_seconds, rate=rate, seed=0, streamed=mine.streamed, prompt_tokens=load.prompt_tokens,
            output_tokens=mine.output_tokens, timeout_seconds=mine.timeout_seconds, turns=mine.turns, claims=mine.claims,
        )  # fmt: skip
        plans = []
        for sender in range(senders):
            own = [(tenant, token, len(range(sender, count, senders))) for tenant, token, count in lanes]
            seeded = (self._scenario.settings.run.seed * 1000 + seed) * 100 + sender
            plans.append(replace(plan, lanes=own, seed=seeded, idle=len(range(sender, idle, senders))))
        self._note(f"{name} begins")
        return Part(await together(PROGRAM, plans, START_SECONDS + load.most_seconds), plan.seconds)

    def _costs(self, result: Result, name: str, part: Part) -> None:
        """The gateways' processor time and memory over a part."""
        if self._usage is not None:
            costs(result, name, [part], "gateway", self._usage)

    def _seen(self, part: Part) -> None:
        """Versions that answered, and how many answers each."""
        counts: dict[int, int] = {}
        for call in part.calls:
            for version in call.versions:
                counts[version] = counts.get(version, 0) + 1

        def told(result: Result) -> None:
            columns = result.series.setdefault("versions", {"versions": [], "answers": []})
            total = dict(zip(columns["versions"], columns["answers"], strict=True))
            for version, count in counts.items():
                total[float(version)] = total.get(float(version), 0.0) + count
            columns["versions"], columns["answers"] = sorted(total), [total[version] for version in sorted(total)]

        self._told.append(told)

    @contextlib.asynccontextmanager
    async def _bare(self) -> AsyncIterator[str]:
        """The engine alone; its URL, "" where it isn't asked for."""
        settings, load = self._scenario.settings, self._load
        if not self._mine.bare or self._mine.urls:
            yield ""
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        engine = {
            "slots": settings.rollout.slots * load.workers, "max_context_tokens": settings.rollout.max_context_tokens,
            **settings.rollout.arguments,
        }  # fmt: skip
        plan = {"engine": engine, "chunk_tokens": settings.gateway.chunk_tokens, "port": port}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "towline.loadtest.bare", stdin=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(plan).encode() + b"\n")
        if self._usage is not None:
            self._usage.also("bare", process.pid)
        try:
            async with asyncio.timeout(START_SECONDS):
                while True:
                    if process.returncode is not None:
                        raise UnavailableError("the engine alone didn't start; it said why above", code="bare")
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                        writer.close()
                        break
                    await asyncio.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


def costs(result: Result, name: str, parts: list[Part], process: str, usage: Usage) -> None:
    spent = sum(usage.cpu_seconds(process, part.began, part.ended) for part in parts)
    calls = sum(len(part.calls) for part in parts)
    lasted = sum(part.ended - part.began for part in parts)
    result.metrics[f"{name}.{process}_cpu_seconds_per_request"] = spent / max(calls, 1)
    result.metrics[f"{name}.{process}_cores"] = spent / lasted
    result.metrics[f"{name}.clients_cpu_seconds_per_request"] = sum(part.cpu_seconds for part in parts) / max(calls, 1)
    result.metrics[f"{name}.{process}_rss_bytes"] = usage.rss_bytes(process, parts[-1].ended)


def _closed_figures(result: Result, found: dict[str, list[Part]], usage: Usage | None) -> None:
    """Medians of the rounds' rates, latencies of them all; what the gateway adds to the engine alone."""
    metrics = result.metrics
    for name, parts in found.items():
        if not parts:
            continue
        seconds = sum(part.seconds for part in parts)
        tell(result, name, [call for part in parts for call in part.calls], parts[0].began, seconds)
        for metric, of in (("requests", lambda call: 1), ("tokens", lambda call: call.tokens)):
            rates = [sum(of(call) for call in _inside(part)) / part.seconds for part in parts]
            metrics[f"{name}.{metric}_per_second"] = float(np.median(rates))
        if usage is not None:
            costs(result, name, parts, "gateway" if name == "closed" else "bare", usage)
        result.tables.setdefault("rounds", []).extend(
            {"system": name, "round": turn, "requests_per_second": len(_inside(part)) / part.seconds, "latency_p50": _p50(part)}
            for turn, part in enumerate(parts)
        )
    if found["bare"]:
        for name in ("latency", "ttft"):
            for quantile in ("p50", "p90", "p99"):
                ours, theirs = (metrics.get(f"{one}.{name}_seconds.{quantile}") for one in ("closed", "bare"))
                if ours is not None and theirs is not None:
                    metrics[f"overhead.{name}_seconds.{quantile}"] = ours - theirs
        metrics["closed.share_of_bare"] = metrics["closed.requests_per_second"] / max(metrics["bare.requests_per_second"], 1e-9)


def _inside(part: Part) -> list[Call]:
    return [call for call in part.calls if call.outcome == OK and part.began <= call.ended < part.began + part.seconds]


def _p50(part: Part) -> float:
    return float(np.median([call.latency for call in part.calls if call.outcome == OK] or [0.0]))
