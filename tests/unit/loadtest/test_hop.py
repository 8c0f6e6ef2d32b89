"""The open loop counts from the time at which a message was meant to be sent; the knee is where that stops being kept."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from towline.contract.task import SamplingParams
from towline.engine.base import GenerateRequest, Generation, Progress
from towline.loadtest import timing
from towline.loadtest.ends import HEAD, Plan, consume, intended, produce
from towline.loadtest.timing import TimedEngine, Timings
from towline.loadtest.transport import knee

STALL = 0.3


def plan(**given: Any) -> Plan:
    common: dict[str, Any] = {
        "system": "towline",
        "messages": 5,
        "payload_bytes": 64,
        "window": 1,
        "run": "r",
        "bus": {},
        "store": {},
    }
    return Plan(**(common | given))


class Stalling:
    """A system that stands still once, for everybody."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def send(self, number: int, payload: bytes) -> None:
        if number == 10:
            await asyncio.sleep(STALL)
        self.sent.append(payload)


async def test_a_stall_is_charged_to_every_message_that_was_due_in_it() -> None:
    """A closed loop would see one slow message; of a rate of 100 a second a stall of 0.3 s delays thirty."""
    found = await produce(plan(role="produce", profile=[(0.6, 100.0)]), Stalling())
    slow = [seconds for seconds in found["acks"] if seconds > STALL / 3]
    assert len(slow) >= 15
    assert max(found["acks"]) >= STALL
    assert found["sent"] == 60


def test_a_profile_is_its_rates_one_after_the_other() -> None:
    assert intended([(1.0, 2.0), (0.5, 4.0)]) == [0.0, 0.5, 1.0, 1.25]


async def test_what_comes_twice_counts_once() -> None:
    class Sink:
        async def open(self) -> None: ...
        async def close(self) -> None: ...

        async def receive(self) -> Any:
            for number in (0, 1, 1, 2):
                yield HEAD.pack(0.0, number) + bytes(64 - HEAD.size)

    found = await consume(plan(role="consume", messages=3), Sink())
    assert (found["received"], found["twice"], len(found["latencies"])) == (3, 1, 3)


@pytest.mark.parametrize(
    ("achieved", "p50", "expected"),
    [
        ([100, 200, 400], [1, 1, 1], 400),
        ([100, 200, 300], [1, 1, 1], 200),
        ([100, 200, 400], [1, 20, 20], 100),
        ([50, 50, 50], [1, 1, 1], 0),
    ],
)
def test_the_knee_is_the_last_rate_that_was_kept_up_with(achieved: list[float], p50: list[float], expected: float) -> None:
    assert knee([100, 200, 400], achieved, p50) == expected


async def test_ttft_itl_and_tpot_are_what_sglang_and_guidellm_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """First token after 2 s, then four more, one each 0.5 s."""
    clock = itertools.chain([100.0, 102.0, 102.5, 103.0, 103.5, 104.0, 104.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    told: list[int] = []

    class Engine:
        name, slots, version, max_context = "scripted", 1, 0, 10
        start = stop = abort = health = None

        async def generate(self, request: GenerateRequest) -> Generation:
            assert request.on_progress is not None
            for count in range(1, 6):
                request.on_progress(
                    Progress(tokens=[1] * count, logprobs=[0.0] * count, spans=[], queue_seconds=0, generate_seconds=0)
                )
            return Generation(tokens=[1] * 5, logprobs=[0.0] * 5, spans=[], finish="stop", queue_seconds=0, generate_seconds=0)

    timings = Timings()
    request = GenerateRequest(
        request_id="r", tokens=[1], sampling=SamplingParams(max_tokens=9), seed=0,
        on_progress=lambda progress: told.append(len(progress.tokens)), progress_every=2,
    )  # fmt: skip
    await TimedEngine(Engine(), timings).generate(request)  # type: ignore[arg-type]
    assert list(timings.ttft) == [2.0]
    assert list(timings.itl) == [0.5] * 4
    assert list(timings.tpot) == [0.5]
    assert list(timings.tpot_whole) == [0.8]
    assert told == [2, 4], "whoever asked for progress is told as often as it asked"
