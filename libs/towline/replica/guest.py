"""A request that a replica's door has taken: whether it can be served at all, and which versions may serve it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from nats.aio.msg import Msg

from towline.contract.serve import ServeFinish, ServeRequest
from towline.engine.base import GenerateRequest, Progress, token_budget
from towline.errors import MissingError, UsageError
from towline.store.lineage import Lineage

_ANY_VOCABULARY = 1 << 31


@dataclass(slots=True, eq=False)
class Guest:
    """A request that was taken."""

    request: ServeRequest
    reply: str
    news: asyncio.Event = field(default_factory=asyncio.Event)
    number: int = 0
    sent: int = 0
    """Tokens."""
    latest: Progress | None = None
    why: ServeFinish | None = None
    """Why it ends before its own end."""
    begun: bool = False
    heard: asyncio.Future[Msg] | None = None
    """The last sign of life, which is answered only where nobody listens any more."""


def accepts(lineage: Lineage, request: ServeRequest, version: int) -> bool:
    """Whether the version is the exact one or, where a least one is given, on the newest line with at least its depth."""
    if request.exact_version is not None:
        return version == request.exact_version
    if request.min_version is None:
        return True
    try:
        return lineage.on_line(version) and lineage.depth(version) >= lineage.depth(request.min_version)
    except MissingError:
        return False


def engine_id(request: ServeRequest) -> str:
    return f"serve.{request.id}"


def engine_request(
    request: ServeRequest, prompt: list[int], on_progress: Callable[[Progress], None] | None = None
) -> GenerateRequest:
    return GenerateRequest(
        request_id=engine_id(request), tokens=prompt, sampling=request.sampling, seed=request.seed, position0=request.position0,
        on_progress=on_progress, progress_every=max(request.chunk_tokens, 1),
    )  # fmt: skip


def contradiction(request: ServeRequest) -> str | None:
    """What no replica could serve, ever."""
    if request.min_version is not None and request.exact_version is not None:
        return "min_version and exact_version: give one of them"
    return None


def misfit(request: ServeRequest, prompt: list[int], max_context: int) -> str | None:
    """Why an engine with `max_context` tokens has no room for the request."""
    try:
        token_budget(engine_request(request, prompt), vocabulary=_ANY_VOCABULARY, max_context=max_context)
    except UsageError as error:
        return error.message
    return None
