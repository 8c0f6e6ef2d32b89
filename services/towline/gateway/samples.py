"""One sample of a request: its tokens from whichever replicas served it, each by a version that the request accepts.

A replica that dies, stops or moves away loses nothing: another one goes on after the tokens that stand. Since token i's random
number depends on (seed, i) alone, the same version gives the very same tokens there.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal

import structlog

from towline import spans
from towline.contract.serve import ServeChunk, ServeFinish, ServeRequest
from towline.contract.task import SamplingParams, VersionSpan, pack_tokens
from towline.errors import MalformedError
from towline.gateway.calls import Calls, Gone, Refused
from towline.gateway.fleet import Fleet
from towline.gateway.routing import Constraint

RETRY_SECONDS = 0.25
"""Between two rounds over replicas that all refused, where nothing is heard of a change."""
MOST_FAILURES = 4
"""Replicas that fail a request one after the other without a token: it isn't tried on a fifth."""
SampleFinish = Literal["stop", "length", "superseded"]
_log = structlog.get_logger("towline.gateway")


class NotReady(Exception):
    """Replicas are there, and none of them serves a version that the request accepts."""

    def __init__(self, constraint: Constraint, applied: int | None, message: str) -> None:
        super().__init__(message)
        self.constraint, self.applied, self.message = constraint, applied, message


class NoReplica(Exception):
    """There is no replica, or none has room."""


class Invalid(Exception):
    """The door says that no repeat would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What all attempts at a sample share."""

    prompt: list[int]
    sampling: SamplingParams
    seed: int
    constraint: Constraint
    wait_seconds: float
    """How long a first compatible replica is waited for."""
    session: str | None = None


@dataclass(slots=True)
class Sample:
    """What stands of it; `spans` cover `tokens`."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: SampleFinish | None = None
    replicas: int = 0
    """How many served it."""

    def add(self, tokens: list[int], logprobs: list[float], spans: tuple[VersionSpan, ...], offset: int) -> None:
        """More tokens; the spans count from token `offset` of the sample."""
        if not len(tokens) == len(logprobs) == sum(span.end - span.start for span in spans):
            raise MalformedError("a chunk whose tokens, logprobs and spans differ in length", code="chunk")
        for span in spans:
            start, end = span.start + offset, span.end + offset
            if start != (self.spans[-1].end if self.spans else 0):
                raise MalformedError("a chunk whose spans don't follow each other", code="chunk")
            if self.spans and self.spans[-1].version == span.version:
                last = self.spans[-1]
                self.spans[-1] = VersionSpan(last.start, end, last.version, last.cut)
            else:
                # Another replica computed the prefix anew, as after a retract.
                cut = "retract" if self.spans and span.cut == "start" else span.cut
                self.spans.append(VersionSpan(start, end, span.version, cut))
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)

    def drop_after(self, count: int) -> None:
        """Keep `count` tokens."""
        del self.tokens[count:], self.logprobs[count:]
        self.spans = [VersionSpan(s.start, min(s.end, count), s.version, s.cut) for s in self.spans if s.start < count]


class Sampler:
    """Brings samples to their end."""

    def __init__(self, fleet: Fleet, calls: Calls, *, chunk_tokens: int, resume_seconds: float) -> None:
        self._fleet, self._calls = fleet, calls
        self._chunk_tokens, self._resume_seconds = chunk_tokens, resume_seconds
        self.continued = 0
        """Calls that went on after tokens that stood."""

    async def run(self, ask: Ask, sample: Sample) -> AsyncGenerator[None, None]:
        """Extend `sample`, yielding after each piece, until its `finish` is set.

        `NotReady`, `NoReplica` or `Invalid` where it can't go on.
        """
        tried: set[str] = set()
        failures = 0
        cause: str | None = None
        fresh = False
        until = time.monotonic() + ask.wait_seconds
        while not self._is_over(ask, sample):
            replica = self._fleet.best(ask.constraint, ask.prompt, ask.session, tried)
            if replica is None and not fresh:
                # Before anything is refused or ended: what is known may be a quarter of a second old.
                await self._fleet.refresh()
                fresh = True
                tried.clear()
                continue
            if replica is None:
                if cause == "superseded" and sample.tokens:
                    sample.finish = "superseded"
                    return
                left = until - time.monotonic()
                if left <= 0 or failures >= MOST_FAILURES:
                    self._give_up(ask, cause)
                await self._fleet.wait(min(left, RETRY_SECONDS))
                tried.clear()
                continue
            before = len(sample.tokens)
            try:
                async with contextlib.aclosing(self._one_call(replica, ask, sample)) as pieces:
                    async for finish in pieces:
                        if finish == "stop" or finish == "length":
                            sample.finish = finish
                            return
                        if finish is not None:
                            cause = finish
                        yield
            except Refused as refusal:
                if refusal.code == "invalid":
                    raise Invalid(refusal.message) from None
                tried.add(replica)
                if refusal.code == "draining":
                    self._fleet.down(replica)
                if cause is None or refusal.code == "busy":
                    cause = refusal.code
                continue
            except (Gone, MalformedError) as error:
                _log.warning("replica_gone", replica=replica, reason=str(error), tokens=len(sample.tokens))
                self._fleet.down(replica)
                cause = "gone"
            if cause in ("handed_over", "gone"):
                self._fleet.down(replica)
            if cause != "superseded":
                failures = failures + 1 if len(sample.tokens) == before else 0
                if sample.tokens:
                    until = max(until, time.monotonic() + self._resume_seconds)
            tried, fresh = {replica}, False

    async def _one_call(self, replica: str, ask: Ask, sample: Sample) -> AsyncGenerator[ServeFinish | None, None]:
        """Yields after each piece; what the last chunk says of the end, else None."""
        offset = len(sample.tokens)
        request = ServeRequest(
            id=secrets.token_hex(12), tokens=pack_tokens(ask.prompt + sample.tokens), sampling=ask.sampling, seed=ask.seed,
            position0=offset, min_version=ask.constraint.min_version, exact_version=ask.constraint.exact_version,
            chunk_tokens=self._chunk_tokens,
        )  # fmt: skip
        span = spans.child("gateway.call", "client")
        with span, self._fleet.visit(replica, ask.prompt, ask.session) as hear:
            async with contextlib.aclosing(self._calls.call(replica, request, span.headers)) as chunks:
                try:
                    async for chunk in chunks:
                        hear(chunk)
                        self._take(chunk, sample, offset)
                        if span and chunk.finish is not None:
                            span.set(replica=replica, position=offset, tokens=len(sample.tokens) - offset, finish=chunk.finish)
                        if chunk.finish is not None or chunk.tokens is not None:
                            yield chunk.finish
                except Refused as refusal:
                    self._fleet.heard(replica, refusal.applied)
                    raise

    def _take(self, chunk: ServeChunk, sample: Sample, offset: int) -> None:
        tokens, logprobs = chunk.content()
        if tokens:
            if len(sample.tokens) == offset:
                sample.replicas += 1
                self.continued += offset > 0
            sample.add(tokens, logprobs, chunk.spans, offset)

    def _is_over(self, ask: Ask, sample: Sample) -> bool:
        """What stands may be whole already, though nobody said so before a crash."""
        if sample.finish is None and sample.tokens:
            if sample.tokens[-1] in ask.sampling.stop_token_ids:
                sample.finish = "stop"
            elif len(sample.tokens) >= ask.sampling.max_tokens:
                sample.finish = "length"
        return sample.finish is not None

    def _give_up(self, ask: Ask, cause: str | None) -> None:
        fleet = self._fleet
        versions, target = fleet.versions(), ask.constraint.target
        if not versions:
            raise NoReplica("no replica serves any version; start rollout workers with gateway.doors = true")
        if cause in ("busy", "failed", "gone", "handed_over"):
            words = {"busy": "has room", "failed": "could serve the request", "gone": "answers", "handed_over": "goes on with it"}
            raise NoReplica(f"no compatible replica {words[cause]}; try again")
        wanted = "a version of the newest line" if target is None else (
            f"exactly version {target}" if ask.constraint.exact_version is not None else f"version {target} or a later one"
        )  # fmt: skip
        raise NotReady(ask.constraint, fleet.applied(), f"{wanted} isn't served; served are {list(versions)}")
