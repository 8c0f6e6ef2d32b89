"""TTFT, ITL and TPOT as a client of the engine sees them, of a share of the turns.

The meanings are those of sglang's bench_serving and guidellm. TTFT: from the request to its first token. ITL: the time between
one token and the next. TPOT (sglang): (latency - TTFT) / (tokens - 1), the mean of a request's ITLs. Guidellm's `time per output
token` divides the whole latency by the tokens, TTFT included; it's `tpot_whole` here. All of it is wall time around
`engine.generate`, queueing included.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from towline.delta.state import ModelState
from towline.engine.base import Activation, ActivationMode, Engine, GenerateRequest, Generation, Progress

KEPT = 400
"""Turns of which a process remembers the times: the newest."""
EACH_SECONDS = 1.0
"""At most one turn in so long is watched token by token: watching costs the machine that is measured."""
GAPS_KEPT = 32


@dataclass(slots=True)
class Timings:
    """Of one process: seconds. `itl` has (mean gap of an interval, tokens in it)."""

    ttft: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    tpot: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    tpot_whole: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    itl: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT * 2))
    watched_at: float = 0.0

    def plain(self) -> dict[str, list[float]]:
        """The newest of each, for a status entry."""
        return {
            name: [round(value, 6) for value in list(getattr(self, name))[-100:]]
            for name in ("ttft", "tpot", "tpot_whole", "itl")
        }


class TimedEngine:
    """The engine within, observed: `towline.engine.base.Engine`."""

    def __init__(self, engine: Engine, timings: Timings) -> None:
        self._engine, self._timings = engine, timings
        self.name = engine.name
        self.slots = engine.slots
        self.start, self.stop, self.abort, self.health = engine.start, engine.stop, engine.abort, engine.health

    @property
    def version(self) -> int | None:
        return self._engine.version

    @property
    def max_context(self) -> int:
        return self._engine.max_context

    async def activate(self, state: ModelState, version: int, mode: ActivationMode, changed: set[str] | None) -> Activation:
        return await self._engine.activate(state, version, mode, changed)

    async def logprobs(self, tokens: list[int]) -> list[float] | None:
        return await self._engine.logprobs(tokens)

    async def generate(self, request: GenerateRequest) -> Generation:
        began = time.perf_counter()
        if began - self._timings.watched_at < EACH_SECONDS:
            return await self._engine.generate(request)
        self._timings.watched_at = began
        watch = _Watch(began, request.on_progress, request.progress_every)
        done = await self._engine.generate(replace(request, on_progress=watch.see, progress_every=1))
        watch.end(len(done.tokens), self._timings)
        return done


@dataclass(slots=True)
class _Watch:
    """One turn. The engine tells each token; whoever asked for less is told as often as it asked."""

    began: float
    tell: Callable[[Progress], None] | None
    every: int
    told: int = 0
    seen: int = 0
    first: float | None = None
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)

    def see(self, progress: Progress) -> None:
        now, count = time.perf_counter(), len(progress.tokens)
        if self.first is None:
            self.first = now
        elif count > self.seen and len(self.gaps) < GAPS_KEPT:
            self.gaps += [(now - self.last) / (count - self.seen)] * (count - self.seen)
        self.last, self.seen = now, count
        if self.tell is not None and count - self.told >= self.every:
            self.told = count
            self.tell(progress)

    def end(self, tokens: int, timings: Timings) -> None:
        latency = time.perf_counter() - self.began
        ttft = latency if self.first is None else self.first - self.began
        timings.ttft.append(ttft)
        timings.itl.extend(self.gaps[:GAPS_KEPT])
        if tokens:
            timings.tpot_whole.append(latency / tokens)
        if tokens > 1:
            timings.tpot.append((latency - ttft) / (tokens - 1))
