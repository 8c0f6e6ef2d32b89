"""Requests to an engine, and what their answers are measured by."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from towline.contract.task import SamplingParams, VersionSpan
from towline.engine.base import GenerateRequest, Generation, Progress
from towline.engine.sglang.engine import SglangEngine

TOLERANCE = 1e-4
Started = Callable[..., Awaitable[SglangEngine]]
"""Starts an engine: see tests/sglang/conftest.py."""


def request(
    name: str,
    tokens: list[int],
    limit: int,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    every: int = 50,
    **sampling: Any,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, tokens=tokens, seed=7, sampling=SamplingParams(max_tokens=limit, **sampling),
        on_progress=on_progress, progress_every=every,
    )  # fmt: skip


async def long_run(engine: SglangEngine, wanted: GenerateRequest) -> asyncio.Task[Generation]:
    """A generation that is underway: it has brought its first tokens."""
    task = asyncio.create_task(engine.generate(wanted))
    generations = engine._generations
    assert generations is not None
    for _ in range(4000):
        run = generations.runs.get(wanted.request_id)
        if run is not None and run.stream is not None and run.stream.tokens:
            return task
        if task.done():
            break
        await asyncio.sleep(0.005)
    raise AssertionError("the generation wasn't seen underway")


def furthest(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def clipped(spans: list[VersionSpan], count: int) -> list[VersionSpan]:
    """The spans of the first `count` tokens."""
    return [VersionSpan(s.start, min(s.end, count), s.version, s.cut) for s in spans if s.start < count]


def check_progress(told: list[Progress], whole: Generation, every: int) -> None:
    """Each is the beginning of what came in the end, and `every` tokens at least longer than the one before."""
    counts = [len(progress.tokens) for progress in told]
    assert all(later - earlier >= every for earlier, later in zip([0, *counts], counts, strict=False))
    for progress, count in zip(told, counts, strict=True):
        assert progress.tokens == whole.tokens[:count]
        assert progress.logprobs == whole.logprobs[:count]
        assert progress.spans == clipped(whole.spans, count)
        assert progress.queue_seconds >= 0
        assert progress.generate_seconds > 0
