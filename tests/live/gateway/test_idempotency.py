"""An Idempotency-Key: one request, one answer, whoever asks again and whatever the first attempt had got to."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx

from live.gateway.conftest import Scene, events, spell
from support.waiting import until
from towline.bus.topology import IDEMPOTENCY
from towline.gateway.idempotency import KEPT_SECONDS, Ledger

SLOW = {"tokens_per_second": 60.0}


def body(count: int = 80, **fields: Any) -> dict[str, Any]:
    return {"input_ids": spell("abc"), "sampling_params": {"max_new_tokens": count, "ignore_eos": True}} | fields


async def test_the_later_of_two_requests_with_a_key_goes_on_and_the_earlier_sends_no_more(scene: Scene) -> None:
    scene.seed()
    worker = (await scene.worker(engine="synthetic", arguments=SLOW)).worker
    first, second = await scene.gateway(), await scene.gateway()
    headers = {"Idempotency-Key": "k"}
    given = body(stream=True, incremental_streaming_output=True)
    seen: list[int] = []
    told: list[Any] = []

    async def read() -> None:
        async with first.stream("POST", "/generate", json=given, headers=headers) as response:
            async for event in events(response):
                told.append(event)
                seen.extend(event.get("output_ids", []) if isinstance(event, dict) else [])

    reading = asyncio.create_task(read())
    await until(lambda: len(seen) > 4)
    tokens: list[int] = []
    async with second.stream("POST", "/generate", json=given, headers=headers) as response:
        async for event in events(response):
            if isinstance(event, dict):
                tokens += event["output_ids"]
                meta = event["meta_info"]
    await reading
    assert len(tokens) == 80
    assert tokens[: len(seen)] == seen
    assert len(seen) < 80
    assert told[-1]["error"]["type"] == "IdempotencyKeyInUse"
    await until(lambda: worker.busy == 0)
    again = (await first.post("/generate", json=given | {"stream": True}, headers=headers)).text
    assert again.count(meta["id"]) >= 1
    assert worker.report()["requests"]["served"] == 1, "the answer that stood was sent again"


async def test_a_refusal_leaves_the_key_free_and_a_whole_answer_outlives_every_replica(scene: Scene) -> None:
    scene.seed()
    running = await scene.worker(engine="synthetic")
    client = await scene.gateway()
    headers = {"Idempotency-Key": "later"}
    given = body(weight_version={"min_version": 2})
    assert (await client.post("/generate", json=given, headers=headers)).status_code == 409
    await asyncio.to_thread(scene.world.commit, 1)
    await scene.world.served(2)
    answer = (await client.post("/generate", json=given, headers=headers)).raise_for_status().json()
    chat = {"model": scene.world.run, "messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 40}
    said = (await client.post("/v1/chat/completions", json=chat, headers={"Idempotency-Key": "chat"})).raise_for_status().json()
    bad = await client.post("/generate", json=given, headers={"Idempotency-Key": "x" * 256})
    assert bad.status_code == 400
    running.worker.drain()
    await running.ended
    assert (await client.post("/generate", json=body())).status_code == 503
    assert (await client.post("/generate", json=given, headers=headers)).json() == answer
    again = (await client.post("/v1/chat/completions", json=chat, headers={"Idempotency-Key": "chat"})).json()
    assert again == said
    other = await client.post("/v1/completions", json={"model": scene.world.run, "prompt": "a"}, headers=headers)
    assert other.status_code == 422


async def test_entries_stay_small_and_what_they_left_in_the_store_is_swept(scene: Scene) -> None:
    scene.seed()
    await scene.worker(engine="synthetic", max_context_tokens=2048)
    client = await scene.gateway()
    await _ask(client, "long", 500)
    await _ask(client, "short", 4)
    entries = await scene.world.bus.kv(IDEMPOTENCY).items()
    assert len(entries) == 2
    assert max(map(len, entries.values())) < 500
    prefix = f"{scene.world.run}/idempotency/"
    assert len(list(scene.world.objects.list(prefix))) == 3, "two prompts and the long answer"
    ledger = Ledger(scene.world.bus, scene.world.objects, scene.world.run)
    assert ledger.sweep() == 0
    assert ledger.sweep(time.time() + KEPT_SECONDS + 60) == 3
    gone = await client.post("/generate", json=body(500), headers={"Idempotency-Key": "long"})
    assert gone.status_code == 503
    assert "use a new key" in gone.json()["error"]["message"]


async def _ask(client: httpx.AsyncClient, key: str, count: int) -> None:
    (await client.post("/generate", json=body(count), headers={"Idempotency-Key": key})).raise_for_status()
