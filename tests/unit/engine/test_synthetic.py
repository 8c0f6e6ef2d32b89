"""The synthetic engine keeps the engine's promises without a model, and repeats itself for a seed."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from towline.config import RolloutSettings
from towline.contract.task import SamplingParams, VersionSpan
from towline.engine.base import GenerateRequest, Progress
from towline.engine.choice import make_engine
from towline.engine.synthetic import SyntheticEngine
from towline.errors import EngineError, UsageError


@pytest.fixture
async def engines() -> AsyncIterator[Any]:
    made: list[SyntheticEngine] = []

    async def make(**arguments: Any) -> SyntheticEngine:
        made.append(SyntheticEngine(**({"slots": 8} | arguments)))
        await made[-1].start(Path(), 0)
        return made[-1]

    yield make
    for engine in made:
        await engine.stop()


def request(seed: int, *, name: str = "", max_tokens: int = 2000, stops: tuple[int, ...] = (2,)) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{seed}{name}", tokens=[1], sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=stops), seed=seed
    )


async def test_a_seed_repeats_itself_and_lengths_are_spread_around_their_mean(engines: Any) -> None:
    one, two = await engines(mean_tokens=100.0, sigma=0.5), await engines(mean_tokens=100.0, sigma=0.5)
    first = await asyncio.gather(*(one.generate(request(seed)) for seed in range(400)))
    second = await asyncio.gather(*(two.generate(request(seed)) for seed in range(400)))
    assert [result.tokens for result in first] == [result.tokens for result in second]
    lengths = [len(result.tokens) for result in first]
    assert 90 < sum(lengths) / 400 < 110
    assert min(lengths) < 50 < 200 < max(lengths)
    assert all(result.tokens[-1] == 2 and 2 not in result.tokens[:-1] and result.finish == "stop" for result in first)


async def test_the_token_limit_ends_a_sample(engines: Any) -> None:
    engine = await engines(mean_tokens=500.0, sigma=0.1)
    result = await engine.generate(request(1, max_tokens=7))
    assert (len(result.tokens), len(result.logprobs), result.finish) == (7, 7, "length")


async def test_a_sample_goes_on_from_any_token_as_the_whole_would_have(engines: Any) -> None:
    engine = await engines(mean_tokens=60.0, sigma=0.6, failure_rate=0.0)
    whole = await engine.generate(request(3))
    assert len(whole.tokens) > 20
    for at in (1, len(whole.tokens) // 2, len(whole.tokens) - 1):
        going_on = replace(request(3, name=f"at{at}"), tokens=[1, *whole.tokens[:at]], position0=at)
        rest = await engine.generate(going_on)
        assert (whole.tokens[:at] + rest.tokens, rest.finish) == (whole.tokens, whole.finish)
    following = await engine.generate(replace(request(3, name="next"), tokens=[1, *whole.tokens], position0=len(whole.tokens)))
    assert following.tokens != whole.tokens, "the next turn is another"


async def test_what_runs_tells_what_it_has_and_goes_on_from_there(engines: Any) -> None:
    engine = await engines(mean_tokens=300.0, sigma=0.01, tokens_per_second=2000.0)
    told: list[Progress] = []
    running = asyncio.create_task(engine.generate(replace(request(1), on_progress=told.append, progress_every=50)))
    await asyncio.sleep(0.06)
    await engine.activate({}, 1, "in_place", None)
    whole = await running
    counts = [len(progress.tokens) for progress in told]
    assert len(counts) >= 2
    assert all(later - earlier >= 50 for earlier, later in itertools.pairwise([0, *counts]))
    for progress in told:
        count = len(progress.tokens)
        assert (progress.tokens, progress.logprobs) == (whole.tokens[:count], whole.logprobs[:count])
        assert progress.spans[-1].end == count


async def test_a_transient_failure_is_over_when_the_request_is_repeated(engines: Any) -> None:
    engine = await engines(transient_failure_rate=0.5, mean_tokens=5.0)
    tries = []
    for seed in range(60):
        count = 1
        while True:
            try:
                await engine.generate(request(seed, name=f"/{count}"))
            except EngineError:
                count += 1
                continue
            break
        tries.append(count)
    assert 90 < sum(tries) < 180


async def test_a_slow_replica_takes_its_factor_longer(engines: Any) -> None:
    arguments = {"mean_tokens": 50.0, "sigma": 0.01, "tokens_per_second": 2000.0, "slow": {"tortoise": 10.0}}
    quick, slow = await engines(**arguments, replica="hare"), await engines(**arguments, replica="tortoise")
    fast_one, slow_one = await asyncio.gather(quick.generate(request(1)), slow.generate(request(1)))
    assert fast_one.tokens == slow_one.tokens
    assert slow_one.generate_seconds > 3 * fast_one.generate_seconds


async def test_failures_come_at_their_rate_and_again_for_the_same_seed(engines: Any) -> None:
    engine = await engines(failure_rate=0.3, mean_tokens=5.0)

    async def fails(seed: int, name: str) -> bool:
        try:
            await engine.generate(request(seed, name=name))
        except EngineError:
            return True
        return False

    first = [await fails(seed, "a") for seed in range(200)]
    assert 35 < sum(first) < 85
    assert first == [await fails(seed, "b") for seed in range(200)]


async def test_an_activation_cuts_what_runs_and_a_drain_waits_for_it(engines: Any) -> None:
    engine = await engines(mean_tokens=60.0, sigma=0.01, tokens_per_second=300.0)
    running = asyncio.create_task(engine.generate(request(1)))
    await asyncio.sleep(0.08)
    await engine.activate({}, 1, "retract", None)
    first = await running
    assert [(span.version, span.cut) for span in first.spans] == [(0, "start"), (1, "retract")]
    assert (first.spans[0].start, first.spans[-1].end) == (0, len(first.tokens))
    running = asyncio.create_task(engine.generate(request(2)))
    await asyncio.sleep(0.05)
    await engine.activate({}, 2, "drain", None)
    assert running.done()
    assert (await running).spans == [VersionSpan(0, len(running.result().tokens), 1, "start")]
    assert engine.version == 2


async def test_speed_is_shared_and_slots_are_kept(engines: Any) -> None:
    engine = await engines(slots=2, mean_tokens=20.0, sigma=0.01, total_tokens_per_second=400.0)
    loop = asyncio.get_running_loop()
    began = loop.time()
    results = await asyncio.gather(*(engine.generate(request(seed)) for seed in range(4)))
    assert loop.time() - began > 0.15, "80 tokens at 400 a second"
    assert results[3].queue_seconds > 0.05 > results[0].queue_seconds


async def test_an_abort_keeps_what_is_there(engines: Any) -> None:
    engine = await engines(mean_tokens=1000.0, sigma=0.01, tokens_per_second=500.0)
    running = asyncio.create_task(engine.generate(request(1)))
    await asyncio.sleep(0.1)
    engine.abort("1")
    result = await running
    assert result.finish == "abort"
    assert 0 < len(result.tokens) < 500


async def test_an_abort_before_the_first_token_gives_back_nothing(engines: Any) -> None:
    engine = await engines(slots=1, mean_tokens=1000.0, sigma=0.01, tokens_per_second=0.5)
    begun, waiting = (asyncio.create_task(engine.generate(request(seed))) for seed in (1, 2))
    await asyncio.sleep(0.05)
    engine.abort("1")
    engine.abort("2")
    for result in (await begun, await waiting):
        assert (result.finish, result.tokens, result.spans) == ("abort", [], [])


async def test_a_request_too_long_for_the_context_is_refused(engines: Any) -> None:
    engine = await engines(max_context_tokens=100)
    with pytest.raises(UsageError, match="context of 100"):
        await engine.generate(request(1, max_tokens=100))


def test_an_engine_s_own_argument_that_does_not_exist_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"rollout\.arguments.*speed"):
        make_engine(RolloutSettings(engine="synthetic", arguments={"speed": 1}))


def test_without_the_torch_engine_a_worker_starts_without_torch() -> None:
    code = (
        "import sys; import towline.rollout_worker.service; from towline.engine.choice import make_engine; "
        "from towline.config import RolloutSettings; make_engine(RolloutSettings(engine='synthetic')); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
