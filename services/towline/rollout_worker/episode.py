"""One sample, from its environment's first tokens to its trajectory: who chose each token, under which version, how likely."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from towline.contract.task import Task, VersionSpan
from towline.contract.trajectory import FinishReason, Segment, Timings, Trajectory
from towline.engine.base import Engine, GenerateRequest, Generation
from towline.environment.base import Environment
from towline.errors import EngineError, TowlineError

T = TypeVar("T")


class EnvironmentFailed(TowlineError):
    """The environment raised, or answered with what isn't a step."""

    default_code = "environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a trajectory says of where it was made."""

    engine: str
    replica: str
    task_sequence: int
    pulled_at: float


class Episode:
    """Runs `task`; `spans` and `tokens` grow turn by turn."""

    def __init__(self, task: Task, environment: Environment, engine: Engine, request_id: str) -> None:
        self._task, self._environment, self._engine, self._request_id = task, environment, engine, request_id
        self.tokens: list[int] = []
        self.spans: list[VersionSpan] = []
        self._segments: list[Segment] = []
        self._logprobs: list[float] = []
        """Of the policy's tokens, in order."""
        self._queue_seconds = self._generate_seconds = 0.0
        self._finish: FinishReason = "length"

    async def run(self) -> None:
        """To its end. `EngineError` or `UsageError` from the engine, `EnvironmentFailed` from the environment."""
        task, turn = self._task, 0
        self._append(await self._ask(self._environment.reset, task), "prompt")
        while True:
            generation = await self._engine.generate(self._request(turn))
            if generation.finish == "abort":
                raise EngineError(f"request {self._request_id} was aborted by the engine", code="engine_aborted")
            self._take(generation)
            step = await self._ask(self._environment.step, generation.tokens, generation.finish)
            if step.done:
                self._finish = "tool_limit" if step.limit_reached else generation.finish
                return
            self._append(step.tokens, step.kind)
            room = self._engine.max_context - len(self.tokens)
            if len(self._logprobs) >= task.sampling.max_tokens or room < 1:
                self._finish = "length"
                return
            turn += 1

    def trajectory(self, origin: Origin) -> Trajectory:
        """What `run` made."""
        task, length = self._task, len(self.tokens)
        mask = np.zeros(length, np.uint8)
        for segment in self._segments:
            mask[segment.start : segment.end] = segment.kind == "policy"
        logprobs = np.full(length, np.nan, np.float32)
        logprobs[mask.astype(bool)] = self._logprobs
        return Trajectory(
            run=task.run,
            lane=task.lane,
            group=task.group,
            sample=task.sample,
            group_size=task.group_size,
            task_sequence=origin.task_sequence,
            attempt=task.attempt,
            prompt_ref=task.prompt_ref,
            reference=task.reference,
            tokens=np.array(self.tokens, np.int32),
            loss_mask=mask,
            logprobs=logprobs,
            version_spans=tuple(self.spans),
            segments=tuple(self._segments),
            finish=self._finish,
            sampling=task.sampling,
            seed=task.seed,
            engine=origin.engine,
            replica=origin.replica,
            timings=Timings(
                pulled_at=origin.pulled_at,
                finished_at=time.time(),
                queue_seconds=self._queue_seconds,
                generate_seconds=self._generate_seconds,
            ),
        )

    def _request(self, turn: int) -> GenerateRequest:
        sampling, done = self._task.sampling, len(self._logprobs)
        if turn:
            # A later turn gets what the context still holds; the first one is refused where the whole doesn't fit.
            most = done + self._engine.max_context - len(self.tokens)
            sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, most))
        return GenerateRequest(
            request_id=f"{self._request_id}.{turn}", tokens=self.tokens, sampling=sampling, seed=self._task.seed, position0=done
        )

    def _append(self, tokens: list[int], kind: Literal["prompt", "policy", "environment", "tool"]) -> None:
        if tokens:
            at = len(self.tokens)
            self.tokens = self.tokens + tokens
            self._segments.append(Segment(at, at + len(tokens), kind))

    def _take(self, generation: Generation) -> None:
        at = len(self.tokens)
        for span in generation.spans:
            cut = span.cut
            if self.spans and cut == "start" and self.spans[-1].version != span.version:
                # A new turn computes its KV cache anew, under the version that it begins with.
                cut = "retract"
            self.spans.append(VersionSpan(at + span.start, at + span.end, span.version, cut))
        self._append(generation.tokens, "policy")
        self._logprobs += generation.logprobs
        self._queue_seconds += generation.queue_seconds
        self._generate_seconds += generation.generate_seconds

    async def _ask(self, call: Callable[..., T | Awaitable[T]], *arguments: Any) -> T:
        try:
            answer = call(*arguments)
            return await answer if inspect.isawaitable(answer) else answer
        except Exception as error:
            name = getattr(call, "__qualname__", "a method")
            raise EnvironmentFailed(f"{name} of environment {self._task.environment}: {type(error).__name__}: {error}") from error
