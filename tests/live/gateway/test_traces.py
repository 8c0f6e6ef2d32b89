"""A request's trace: from its client's traceparent through gateway and door to the engine, streamed or not."""

from __future__ import annotations

import asyncio

import pytest

from live.gateway.conftest import Scene
from support.otlp import SpanSeen, collecting
from towline.config import TelemetrySettings
from towline.runtime.tracing import begin

CLIENT = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_goes_on_with_its_clients_trace_through_the_door_into_the_engine(scene: Scene, stream: bool) -> None:
    scene.seed()
    with collecting() as collector:
        tracing = begin(TelemetrySettings(endpoint=collector.url, sample_ratio=0.0), service="test", replica="0", run="r")
        assert tracing is not None
        try:
            await scene.worker(engine="synthetic")
            client = await scene.gateway()
            body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 6}, "stream": stream}
            for headers in ({"traceparent": CLIENT}, {"traceparent": CLIENT[:-1] + "0"}, {}):
                answer = await client.post("/generate", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
        finally:
            await asyncio.to_thread(tracing.close)
    asked = [span for span in collector.spans if span.trace_id == "a" * 32]
    assert {span.trace_id for span in collector.named("gateway.request")} == {"a" * 32}, "the others aren't traced at ratio 0"
    named = {span.name: span for span in asked}
    assert len(named) == len(asked) == 4
    assert _parents(named) == ["b" * 16, named["gateway.request"].span_id, named["gateway.call"].span_id, named["door"].span_id]
    assert not any(span.failed for span in asked)
    assert named["gateway.request"].attributes["towline.route"] == "/generate"
    assert named["gateway.call"].attributes["towline.tokens"] == named["door"].attributes["towline.tokens"] == 6
    assert named["gateway.call"].attributes["towline.replica"] == named["door"].attributes["towline.replica"] == "w"


def _parents(named: dict[str, SpanSeen]) -> list[str]:
    return [named[name].parent_id for name in ("gateway.request", "gateway.call", "door", "engine.generate")]
