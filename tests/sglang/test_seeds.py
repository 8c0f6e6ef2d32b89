"""A server that draws by the samples' seeds: the same tokens whoever is in the batch, and from wherever a sample goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from support.sglang_requests import Started, request

pytestmark = pytest.mark.sglang
PROMPT = [7, 6, 5, 4]


async def test_tokens_follow_from_the_seed_alone(started: Started) -> None:
    engine = await started(weights="overlay", deterministic=True)
    assert engine.capabilities is not None
    assert engine.capabilities.seeded
    alone = await engine.generate(request("alone", PROMPT, 60))
    among = await asyncio.gather(
        engine.generate(request("again", PROMPT, 60)),
        engine.generate(replace(request("other", PROMPT, 60), seed=8)),
        engine.generate(replace(request("rest", PROMPT + alone.tokens[:25], 60), position0=25)),
    )
    assert among[0].tokens == alone.tokens
    assert among[1].tokens != alone.tokens
    # Handed over after 25 tokens, as by a PARTIAL.
    assert among[2].tokens == alone.tokens[25:]
