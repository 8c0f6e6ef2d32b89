"""What a rollout engine promises: token IDs in, token IDs with behaviour logprobs and exact version spans out.

An engine is driven from one asyncio event loop. Weights change only between two decoding steps, so every token has one
version; the uniform number behind a sample's token i depends on (seed, i) alone, so neither the batch around it nor a
restart or a hand-over changes what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from towline.contract.task import SamplingParams, VersionSpan
from towline.delta.state import ModelState
from towline.errors import UsageError

ActivationMode = Literal["retract", "in_place", "drain"]
"""`retract` recomputes the running sequences' KV cache under the new weights, `in_place` keeps it, `drain` lets them
finish first."""
GenerationFinish = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """All that a running request has so far, from its first token on; the fields are `Generation`'s. Nothing of it changes
    any more: the request's `Generation` begins with it."""

    tokens: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    queue_seconds: float
    generate_seconds: float

    def finished(self, finish: GenerationFinish) -> Generation:
        """It, as a request's whole answer."""
        return Generation(
            tokens=self.tokens, logprobs=self.logprobs, spans=self.spans, finish=finish,
            queue_seconds=self.queue_seconds, generate_seconds=self.generate_seconds,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Go on from `tokens`. `sampling.max_tokens` bounds the sample's policy tokens in all, so at most
    `max_tokens - position0` are generated."""

    request_id: str
    tokens: list[int]
    sampling: SamplingParams
    seed: int
    position0: int = 0
    """Policy tokens of the sample that stand in `tokens` already (earlier turns, a PARTIAL)."""
    on_progress: Callable[[Progress], None] | None = None
    """Called on the event loop whenever `progress_every` more tokens stand than at the last call; not for the last ones. It
    may come late, and an engine leaves out what it can't assign to versions yet."""
    progress_every: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What was generated: the stop token is included, an aborted request keeps what it has."""

    tokens: list[int]
    logprobs: list[float]
    """log-softmax of the chosen token after temperature, before top-k and top-p, computed in float32. Greedy tokens
    (temperature 0) have their logprob at temperature 1."""
    spans: list[VersionSpan]
    """Relative to `tokens`, covering them exactly; empty where nothing was generated."""
    finish: GenerationFinish
    queue_seconds: float
    generate_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """How a version got into the engine."""

    pause_seconds: float
    """How long no token was generated."""
    engine_digest: str | None
    """Model digest over the live weights; None where the engine can't compute one."""


class Engine(Protocol):
    """One model with live weights and `slots` sequences at a time."""

    @property
    def name(self) -> str: ...

    @property
    def slots(self) -> int: ...

    @property
    def version(self) -> int | None:
        """The version that the next token is sampled from; None before `start`."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens of a sequence, prompt and output; final once it is started."""
        ...

    async def start(self, folder: Path, version: int) -> Activation:
        """Load the Hugging Face folder as `version`. Raises `UsageError` or `EngineError`."""
        ...

    async def stop(self) -> None:
        """End; what still runs comes back as an abort. A second call does nothing."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Raises `UsageError` for a request that no repeat would help, `EngineError` where the engine failed. Cancelling
        the call aborts the request."""
        ...

    def abort(self, request_id: str) -> None:
        """Finish the request with what it has; an unknown id is ignored."""
        ...

    async def activate(self, state: ModelState, version: int, mode: ActivationMode, changed: set[str] | None) -> Activation:
        """Serve `state` as `version` from the next token on. `changed` names the tensors that differ from the live ones;
        None means any may. Raises `EngineError`; where it does so before the first write, the old version still serves,
        otherwise `health` fails."""
        ...

    async def logprobs(self, tokens: list[int]) -> list[float] | None:
        """log-softmax at temperature 1 of tokens[1:] given what precedes each: float32, len(tokens) - 1 values. None from an
        engine without a model."""
        ...

    def health(self) -> None:
        """Raises `EngineError` when the engine can't serve."""
        ...


@runtime_checkable
class Recovering(Protocol):
    """An engine that may be away for a while and comes back by itself, its version proved again."""

    @property
    def recovering(self) -> str:
        """Why it can't serve at the moment; "" while it can."""
        ...


def recovering(engine: Engine) -> str:
    """Why the engine is away, "" where it isn't or never is."""
    return engine.recovering if isinstance(engine, Recovering) else ""


def token_budget(request: GenerateRequest, *, vocabulary: int, max_context: int) -> int:
    """How many tokens the request may generate, at least 1; `UsageError` says why it can't be served."""
    length, budget = len(request.tokens), request.sampling.max_tokens - request.position0
    if not length:
        raise UsageError(f"request {request.request_id}: no prompt tokens; give at least one", code="prompt_empty")
    if not 0 <= min(request.tokens) <= max(request.tokens) < vocabulary:
        wrong = next(token for token in request.tokens if not 0 <= token < vocabulary)
        raise UsageError(
            f"request {request.request_id}: token {wrong} isn't in the model's vocabulary of {vocabulary}; "
            "check that prompts and model share a tokenizer",
            code="token_out_of_vocabulary",
        )
    if budget < 1:
        raise UsageError(
            f"request {request.request_id}: max_tokens {request.sampling.max_tokens} leaves nothing to generate after "
            f"{request.position0} tokens",
            code="max_tokens",
        )
    if length + budget > max_context:
        raise UsageError(
            f"request {request.request_id}: {length} tokens and up to {budget} more exceed the context of {max_context}; "
            "raise rollout.max_context_tokens as far as the model allows, or shorten the prompt or sampling.max_tokens",
            code="context_exceeded",
        )
    return budget
