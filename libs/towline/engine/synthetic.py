"""An engine without a model, for load tests: seeded lengths, speed and failures behind the real engine's promises.

Tokens, the ends of turns and failures follow from a sample's seed and a token's place in it alone, so a repeated request gives
the same answer, and one that goes on from a PARTIAL ends where the whole would have. Weights are a version number; an activation
takes `pause_seconds` and cuts running sequences as a real one would.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from towline.contract.task import Cut, VersionSpan
from towline.delta.state import ModelState
from towline.engine.base import (
    Activation,
    ActivationMode,
    GenerateRequest,
    Generation,
    GenerationFinish,
    Progress,
    token_budget,
)
from towline.engine.recording import read_recording
from towline.engine.sampling import seed_word, uniforms
from towline.errors import EngineError

IDLE_SEED = (1 << 63) - (1 << 20)
"""A request with one of the last million seeds is idle: after `idle_after_tokens` it says nothing more until it's aborted. By
chance such a seed comes once in 10^13."""
_TICK_SECONDS = 0.002
"""What falls due within so long is done together."""


@dataclass(slots=True, eq=False)
class _Running:
    request: GenerateRequest
    length: int
    speed: float
    """Tokens a second that it may have."""
    fails_at: int | None
    future: asyncio.Future[Generation]
    enqueued: float
    tell_at: float
    started: float = 0.0
    done: float = 0.0
    """Tokens so far; fractions carry over between ticks."""
    stopped: bool = False
    still_at: float = math.inf
    """So many tokens, and no more while it runs."""
    cuts: list[VersionSpan] = field(default_factory=list)


class SyntheticEngine:
    """See `towline.engine.base.Engine`.

    Turns' lengths are log-normal around `mean_tokens` with `sigma` (of the log), or drawn from `lengths` (those of a recorded
    run) where some are given; capped by the request's limit. A share
    `failure_rate` of the turns fails part-way with `EngineError`, and again whoever repeats it; a share
    `transient_failure_rate` of the calls does so once. Each running sequence gets `tokens_per_second`, at most
    `total_tokens_per_second` in all; 0 means no limit. At most `room` run at a time (0: as many as there are slots), as where a
    KV cache is full; the others wait in the engine's queue. A replica named in `slow` takes that many times as long for all.

    `recorded`: a file of `towline loadtest record`, whose turns, speeds, ends and failures (of calls, not of samples) stand
    instead of `mean_tokens`, `sigma`, `lengths`, `tokens_per_second` and `transient_failure_rate`: those of the sample that a
    prompt's mark names, else of one by the request's seed.

    Digest and probe are None: there are no weights, so an ack of this engine proves the files alone.
    """

    name = "synthetic"

    def __init__(
        self,
        *,
        slots: int,
        max_context_tokens: int = 4096,
        vocabulary: int = 32_000,
        mean_tokens: float = 256.0,
        sigma: float = 0.5,
        lengths: Sequence[int] = (),
        tokens_per_second: float = 0.0,
        total_tokens_per_second: float = 0.0,
        failure_rate: float = 0.0,
        transient_failure_rate: float = 0.0,
        pause_seconds: float = 0.0,
        room: int = 0,
        slow: Mapping[str, float] | None = None,
        recorded: str = "",
        idle_after_tokens: int = 32,
        replica: str = "",
    ) -> None:
        factor = self._factor = (slow or {}).get(replica, 1.0)
        self._recording = read_recording(recorded) if recorded else None
        self._idle_after = idle_after_tokens
        self.slots, self.max_context = slots, max_context_tokens
        self._room = room or slots
        self._vocabulary, self._mean, self._sigma, self._lengths = vocabulary, mean_tokens, sigma, tuple(lengths)
        self._speed = (tokens_per_second or math.inf) / factor
        self._total_speed = (total_tokens_per_second or math.inf) / factor
        self._failure_rate, self._pause_seconds = failure_rate, pause_seconds * factor
        self._transient_rate, self._chance = transient_failure_rate, random.Random(f"transient/{replica}")
        self._version: int | None = None
        self._waiting: dict[str, _Running] = {}
        self._running: dict[str, _Running] = {}
        self._wake = asyncio.Event()
        self._paused = False
        self._draining = False
        self._idle = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._looked_at = 0.0

    @property
    def version(self) -> int | None:
        return self._version

    async def start(self, folder: Path, version: int) -> Activation:
        self._version = version
        self._ticker = asyncio.create_task(self._tick(), name="synthetic-engine")
        return Activation(pause_seconds=0.0, engine_digest=None)

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            for running in [*self._running.values(), *self._waiting.values()]:
                self._finish(running, "abort")

    async def generate(self, request: GenerateRequest) -> Generation:
        self.health()
        budget = token_budget(request, vocabulary=self._vocabulary, max_context=self.max_context)
        wanted, fails_at, ends, speed, once = self._turn(request)
        if self._chance.random() < once:
            fails_at = self._chance.randrange(min(wanted, budget))
        running = _Running(
            request, min(wanted, budget), speed, fails_at, asyncio.get_running_loop().create_future(), time.perf_counter(),
            tell_at=math.inf if request.on_progress is None else request.progress_every,
            stopped=ends and wanted <= budget and bool(request.sampling.stop_token_ids),
        )  # fmt: skip
        if request.seed >= IDLE_SEED:
            running.length, running.still_at, running.fails_at = budget, min(self._idle_after, budget - 0.5), None
        self._waiting[request.request_id] = running
        self._wake.set()
        try:
            return await running.future
        except asyncio.CancelledError:
            self.abort(request.request_id)
            raise

    def abort(self, request_id: str) -> None:
        running = self._running.get(request_id) or self._waiting.get(request_id)
        if running is not None:
            self._advance()
            self._finish(running, "abort")

    async def activate(self, state: ModelState, version: int, mode: ActivationMode, changed: set[str] | None) -> Activation:
        self.health()
        if mode == "drain":
            self._draining = True
            while self._running:
                self._idle.clear()
                await self._idle.wait()
        began = time.perf_counter()
        self._advance()
        self._paused = True
        await asyncio.sleep(self._pause_seconds)
        self._version = version
        for running in self._running.values():
            at = int(running.done)
            if running.cuts[-1].start == at:
                running.cuts.pop()
            cut: Cut = "start" if not running.cuts else "retract" if mode == "retract" else "in_place"
            running.cuts.append(VersionSpan(at, at, version, cut))
        self._advance()
        self._paused = self._draining = False
        self._wake.set()
        return Activation(pause_seconds=time.perf_counter() - began, engine_digest=None)

    async def logprobs(self, tokens: list[int]) -> list[float] | None:
        return None

    def health(self) -> None:
        if self._ticker is None or self._ticker.done():
            raise EngineError("the synthetic engine isn't running; start one", code="engine_stopped")

    def _turn(self, request: GenerateRequest) -> tuple[int, int | None, bool, float, float]:
        """How many tokens are left of the turn that the sample is in at `position0`, after how many of them it fails, whether it
        ends by itself, its tokens a second, and the chance that this call fails."""
        if self._recording is not None:
            return self._recorded_turn(request)
        seed, position0, number, begins = request.seed, request.position0, 0, 0
        while True:
            chance = random.Random(f"{seed}/{number}")
            drawn = chance.lognormvariate(math.log(self._mean) - self._sigma**2 / 2, self._sigma)
            length = max(1, chance.choice(self._lengths) if self._lengths else round(drawn))
            fails_at = chance.randrange(length) if chance.random() < self._failure_rate else None
            if begins + length > position0:
                done = position0 - begins
                left = None if fails_at is None or fails_at < done else fails_at - done
                return length - done, left, True, self._speed, self._transient_rate
            number, begins = number + 1, begins + length

    def _recorded_turn(self, request: GenerateRequest) -> tuple[int, int | None, bool, float, float]:
        assert self._recording is not None
        sample = self._recording.asked(request.tokens, request.seed)
        speed = sample.tokens_per_second / self._factor or self._speed
        once = self._recording.failed_turns(len(sample.turns), environment=False)
        ends = 0
        for turn in sample.turns:
            ends += turn.policy
            if ends > request.position0:
                return ends - request.position0, None, turn is not sample.turns[-1] or sample.ends_by_itself, speed, once
        return 1, None, True, speed, once

    async def _tick(self) -> None:
        while True:
            self._advance()
            self._admit()
            if self._running and not self._paused:
                share = self._share()
                for running in list(self._running.values()):
                    if math.isinf(min(running.speed, share)):
                        running.done = min(running.length, running.still_at)
                    if running.fails_at is not None and running.done >= running.fails_at:
                        self._finish(running, None)
                    elif running.done >= running.length:
                        self._finish(running, "stop" if running.stopped else "length")
                    elif running.done >= running.tell_at and running.request.on_progress is not None:
                        running.tell_at = int(running.done) + running.request.progress_every
                        running.request.on_progress(self._progress(running, None))
            await self._rest()

    def _share(self) -> float:
        """Tokens a second that each running sequence has of the engine's total."""
        return self._total_speed / max(len(self._running), 1)

    def _advance(self) -> None:
        """Everybody's tokens up to now. To be called before anything changes that the rate depends on."""
        now = time.perf_counter()
        if not self._paused:
            share, seconds = self._share(), now - self._looked_at
            for running in self._running.values():
                if not math.isinf(rate := min(running.speed, share)):
                    running.done = min(running.done + rate * seconds, running.length, running.still_at)
        self._looked_at = now

    async def _rest(self) -> None:
        """Until the next sequence has something to say: a thousand engines in a process must cost nothing while they generate."""
        self._wake.clear()
        if self._paused or not self._running:
            if not self._waiting or self._paused or self._draining:
                await self._wake.wait()
            return
        share = self._share()
        seconds = min(self._seconds_left(running, share) for running in self._running.values())
        if seconds == 0.0:
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, _TICK_SECONDS) if math.isfinite(seconds) else None):
                await self._wake.wait()

    @staticmethod
    def _seconds_left(running: _Running, share: float) -> float:
        """Until it has something to say; 0 where that's at once, infinity where it stands still."""
        due = min(running.length, running.tell_at, math.inf if running.fails_at is None else running.fails_at)
        if running.still_at < due and running.done >= running.still_at:
            return math.inf
        return 0.0 if math.isinf(rate := min(running.speed, share)) else (due - running.done) / rate

    def _admit(self) -> None:
        if self._draining or self._paused:
            return
        assert self._version is not None
        for request_id in list(self._waiting)[: self._room - len(self._running)]:
            running = self._running[request_id] = self._waiting.pop(request_id)
            running.started = time.perf_counter()
            running.cuts = [VersionSpan(0, 0, self._version, "start")]

    def _finish(self, running: _Running, finish: GenerationFinish | None) -> None:
        self._running.pop(running.request.request_id, None)
        self._waiting.pop(running.request.request_id, None)
        self._idle.set()
        self._wake.set()
        if running.future.done():
            return
        if finish is None:
            running.future.set_exception(
                EngineError(f"request {running.request.request_id}: the synthetic failure of its seed", code="engine_synthetic")
            )
        else:
            running.future.set_result(self._progress(running, finish).finished(finish))

    def _progress(self, running: _Running, finish: GenerationFinish | None) -> Progress:
        request, count = running.request, int(running.done)
        uniform = uniforms(np.full(count, seed_word(request.seed)), np.arange(request.position0, request.position0 + count))
        tokens = (uniform * self._vocabulary).astype(np.int64)
        stops = request.sampling.stop_token_ids
        if stops and count:
            tokens[np.isin(tokens, stops)] = next(token for token in range(self._vocabulary) if token not in stops)
            if finish == "stop":
                tokens[-1] = stops[0]
        starts = [cut for cut in running.cuts if cut.start < count]
        ends = [*(cut.start for cut in starts[1:]), count][: len(starts)]  # no token, no span
        now = time.perf_counter()
        return Progress(
            tokens=tokens.tolist(),
            logprobs=[-math.log(self._vocabulary)] * count,
            spans=[VersionSpan(cut.start, end, cut.version, cut.cut) for cut, end in zip(starts, ends, strict=True)],
            queue_seconds=(running.started or now) - running.enqueued,
            generate_seconds=now - running.started if running.started else 0.0,
        )
