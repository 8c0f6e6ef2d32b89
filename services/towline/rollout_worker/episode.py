"""One sample, from its environment's first tokens to its end: who chose each token, under which version, how likely.

It can go on from a PARTIAL, and whatever ends it early leaves all that was generated, so that another can.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import msgspec
import structlog

from towline import spans
from towline.config import RolloutSettings
from towline.contract.partial import Partial
from towline.contract.task import Task
from towline.contract.trajectory import FinishReason
from towline.engine.base import Engine, GenerateRequest, Generation, Progress
from towline.environment.base import Closing, Environment, Resumable, Step
from towline.errors import EngineError, TowlineError
from towline.rollout_worker.record import Record

T = TypeVar("T")
ABORT_SECONDS = 2.0
"""How long an engine may take to give back what an aborted request has."""
CLOSE_SECONDS = 5.0
MARGIN_SHARE = 0.1
"""Of a group's time: what rollout.group_margin_seconds takes of it at most."""
_log = structlog.get_logger("towline.rollout_worker")


class EnvironmentFailed(TowlineError):
    """The environment raised, or answered with what isn't a step."""

    default_code = "environment"


class Unusable(Exception):
    """The PARTIAL can't be gone on from; why."""


class Episode:
    """Runs `task`. `record` has what is finished of it, `running` what the engine has told of the turn that isn't.

    `on_news` is called when there is more for a PARTIAL to hold. `limits` has the deadlines of turns and tools.
    """

    def __init__(
        self,
        task: Task,
        environment: Environment,
        engine: Engine,
        request_id: str,
        limits: RolloutSettings,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        self._task, self._environment, self._engine, self._request_id = task, environment, engine, request_id
        self._limits, self._on_news = limits, on_news
        self.record = Record()
        self.running: Progress | None = None
        self.environment_state: bytes | None = None
        """As of the environment's last answer."""
        self.finish: FinishReason | None = None
        """Once it's over."""
        self._turn = 0
        self._resumed = False

    async def resume(self, partial: Partial) -> None:
        """Take over what another had. `Unusable` where the environment doesn't come to the same state."""
        record = Record.of(partial)
        if record.turn in (None, "open") and self._engine.max_context <= len(record.tokens):
            raise Unusable(f"its {len(record.tokens)} tokens fill this engine's context")
        try:
            if isinstance(self._environment, Resumable) and partial.environment_state is not None:
                await self._ask(self._environment.restore, self._task, partial.environment_state)
            else:
                await self._replay(record)
        except EnvironmentFailed as error:
            raise Unusable(error.message) from error
        self.record, self.environment_state, self._resumed = record, partial.environment_state, True

    async def run(self) -> None:
        """To its end. `EngineError` or `UsageError` from the engine, `EnvironmentFailed` from the environment."""
        record, sampling = self.record, self._task.sampling
        if not self._resumed:
            record.answer(await self._first_tokens(), "prompt")
            await self._save()
        while True:
            with spans.child("turn") as span:
                if span:
                    span.set(turn=self._turn)
                if record.turn in (None, "open") and not await self._policy_turn():
                    self.finish = "deadline"
                    return
                finish: Literal["stop", "length"] = "stop" if record.turn == "stop" else "length"
                try:
                    step = await self._answer(record.turn_tokens, finish)
                except TimeoutError:
                    self.finish = "deadline"
                    return
                if step.done:
                    self.finish = "tool_limit" if step.limit_reached else finish
                    return
                record.answer(step.tokens, step.kind)
                await self._save()
            self._turn += 1
            if record.policy_tokens >= sampling.max_tokens or self._engine.max_context - len(record.tokens) < 1:
                self.finish = "length"
                return
            self._on_news()

    async def close(self) -> None:
        """Let the environment go, and whoever listens."""
        self._on_news = _nobody  # whoever listens has this episode
        if isinstance(self._environment, Closing):
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._environment.close()
            except Exception as error:  # noqa: BLE001  (the sample's outcome doesn't depend on it)
                _log.warning("environment_close", environment=self._task.environment, reason=f"{type(error).__name__}: {error}")

    def so_far(self) -> Record:
        """All that there is, with what the engine has told of the running turn."""
        return self.record if self.running is None else self.record.with_turn(self.running)

    # The policy's turns

    async def _policy_turn(self) -> bool:
        """One generation, taken into the record. False where a deadline cut it off."""
        request, seconds = self._request(), self._seconds_left()
        try:
            async with asyncio.timeout(seconds):
                with spans.child("engine.generate", "client") as span:
                    generation = await self._generate(request)
                    if span:
                        span.set(
                            request=request.request_id, prompt_tokens=len(request.tokens), tokens=len(generation.tokens),
                            finish=generation.finish, queue_seconds=generation.queue_seconds,
                            versions=sorted({at.version for at in generation.spans}),
                        )  # fmt: skip
        except TimeoutError:
            if not self.record.policy_tokens:
                raise EngineError(
                    f"request {request.request_id} had no token when its deadline came; see rollout.turn_seconds",
                    code="engine_deadline",
                ) from None
            return False
        if generation.finish == "abort":
            raise EngineError(f"request {request.request_id} was aborted by the engine", code="engine_aborted")
        self._on_news()
        return True

    async def _generate(self, request: GenerateRequest) -> Generation:
        """What the engine made of the request; the record has it then, also where this call is cancelled."""
        running = asyncio.ensure_future(self._engine.generate(request))
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            # `abort` keeps what was generated; a cancelled call would lose it.
            self._engine.abort(request.request_id)
            try:
                with contextlib.suppress(TimeoutError, TowlineError):
                    async with asyncio.timeout(ABORT_SECONDS):
                        self._take(await asyncio.shield(running))
            finally:
                running.cancel()
            raise
        generation = running.result()
        self._take(generation)
        return generation

    def _take(self, generation: Generation) -> None:
        self.running = None
        self.record.take(generation, "open" if generation.finish == "abort" else generation.finish)

    def _request(self) -> GenerateRequest:
        sampling, record = self._task.sampling, self.record
        if self._turn or self._resumed:
            # A later turn gets what the context still holds; the first one is refused where the whole doesn't fit.
            most = record.policy_tokens + self._engine.max_context - len(record.tokens)
            sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, most))
        every = self._limits.partial_every_tokens
        return GenerateRequest(
            request_id=f"{self._request_id}.{self._turn}", tokens=record.tokens, sampling=sampling, seed=self._task.seed,
            position0=record.policy_tokens, on_progress=self._told if every else None, progress_every=max(every, 1),
        )  # fmt: skip

    def _told(self, progress: Progress) -> None:
        self.running = progress
        self._on_news()

    def _seconds_left(self) -> float | None:
        """Of this turn: by the turn's deadline, and by the group's less what reward and buffer may need."""
        limits, left = self._limits, []
        if limits.turn_seconds:
            left.append(limits.turn_seconds)
        if limits.group_margin_seconds:
            task = self._task
            margin = min(limits.group_margin_seconds, MARGIN_SHARE * (task.deadline - task.admitted_at))
            left.append(task.deadline - margin - time.time())
        return min(left, default=None)

    # The environment

    async def _answer(self, tokens: list[int], finish: Literal["stop", "length"]) -> Step:
        """`TimeoutError` past the tool's deadline."""
        async with asyncio.timeout(self._limits.tool_seconds or None) as deadline:
            try:
                with spans.child("environment.step"):
                    return await self._ask(self._environment.step, tokens, finish)
            except EnvironmentFailed as error:
                if deadline.expired():
                    raise TimeoutError from error
                raise

    async def _save(self) -> None:
        """Keep the environment's state, where it has one to keep."""
        if isinstance(self._environment, Resumable):
            self.environment_state = await self._ask(self._environment.save)

    async def _replay(self, record: Record) -> None:
        """Bring a fresh environment to where the record ends, by what the policy said; `Unusable` where it answers otherwise."""
        segments = record.segments
        if not segments or await self._first_tokens() != record.tokens[: segments[0].end]:
            raise Unusable("the environment gave other first tokens")
        turns = [at for at, segment in enumerate(segments) if segment.kind == "policy"]
        for at in turns if record.turn is None else turns[:-1]:
            try:
                step = await self._answer(record.tokens[segments[at].start : segments[at].end], "stop")
            except TimeoutError:
                raise Unusable("the environment took too long to answer again") from None
            following = segments[at + 1] if at + 1 < len(segments) else None
            wanted = record.tokens[following.start : following.end] if following and following.kind != "policy" else []
            if step.done or step.tokens != wanted:
                raise Unusable("the environment answered otherwise than before")

    async def _first_tokens(self) -> list[int]:
        try:
            async with asyncio.timeout(self._limits.tool_seconds or None):
                with spans.child("environment.reset"):
                    return await self._ask(self._environment.reset, self._task)
        except TimeoutError as error:
            raise EnvironmentFailed(f"environment {self._task.environment} took over rollout.tool_seconds to begin") from error

    async def _ask(self, call: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
        try:
            answer = call(*arguments)
            return await answer if inspect.isawaitable(answer) else answer
        except Exception as error:
            name = getattr(call, "__qualname__", "a method")
            raise EnvironmentFailed(f"{name} of environment {self._task.environment}: {type(error).__name__}: {error}") from error


def _nobody() -> None:
    """Listens no more."""
