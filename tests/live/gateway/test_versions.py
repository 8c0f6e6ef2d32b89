"""Which version serves a request: never one that it doesn't accept, at its beginning or later."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from live.gateway.conftest import Scene, events, spell
from support.waiting import until

SLOW = {"tokens_per_second": 60.0}


def body(count: int = 8, **fields: Any) -> dict[str, Any]:
    return {
        "input_ids": spell("abc"),
        "sampling_params": {"max_new_tokens": count, "sampling_seed": 5, "ignore_eos": True},
    } | fields


async def post(client: httpx.AsyncClient, wait: int | None = None, **given: Any) -> httpx.Response:
    headers = {} if wait is None else {"Prefer": f"wait={wait}"}
    return await client.post("/generate", json=body(**given), headers=headers)


async def test_a_version_that_nobody_serves_is_a_409_that_says_what_is_and_waiting_helps(scene: Scene) -> None:
    scene.seed()
    await scene.worker(engine="synthetic")
    client = await scene.gateway()
    commit = scene.world.stage(1)
    for wanted in ("min_version", "exact_version"):
        refused = await post(client, weight_version={wanted: 2})
        assert refused.status_code == 409
        found = refused.json()
        assert (found["type"], found["target_version"], found["applied"]) == ("WeightVersionNotReady", 2, 0)
        assert "2" in found["message"]
    began = time.monotonic()
    assert (await post(client, wait=1, weight_version={"min_version": 2})).status_code == 409
    assert time.monotonic() - began >= 1.0
    waiting = [asyncio.create_task(post(client, wait=20, weight_version={name: 2})) for name in ("min_version", "exact_version")]
    assert commit() == 2
    for task in waiting:
        answer = (await task).raise_for_status().json()
        assert answer["meta_info"]["weight_version_start"] == 2
    late = await post(client, weight_version={"exact_version": 0})
    assert (late.status_code, late.json()["applied"]) == (409, 2)
    assert (await post(client, weight_version={"min_version": 0})).json()["meta_info"]["weight_version"] == "2"


async def test_an_exact_request_holds_its_version_while_it_runs(scene: Scene) -> None:
    scene.seed()
    await scene.worker(engine="synthetic", arguments=SLOW)
    client = await scene.gateway()
    exact = asyncio.create_task(post(client, count=120, weight_version={"exact_version": 0}))
    await until(lambda: scene.workers["w"].worker.busy == 1)
    version = scene.world.commit(1)
    answer = (await exact).json()
    assert answer["meta_info"]["spans"] == [[0, 120, 0, "start"]]
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    await scene.world.served(version)


async def test_a_hold_has_an_end_and_then_the_request_is_superseded_with_what_it_has(scene: Scene) -> None:
    scene.seed()
    await scene.worker(engine="synthetic", arguments=SLOW, gateway={"exact_hold_seconds": 0.2})
    client = await scene.gateway()
    exact = asyncio.create_task(post(client, count=400, weight_version={"exact_version": 0}))
    await until(lambda: scene.workers["w"].worker.busy == 1)
    await asyncio.sleep(0.3)  # some tokens
    scene.world.commit(1)
    answer = (await exact).json()
    meta, tokens = answer["meta_info"], answer["output_ids"]
    assert (meta["finish_reason"]["type"], meta["finish_reason"]["err_type"]) == ("abort", "superseded")
    assert 0 < len(tokens) < 400
    assert meta["spans"] == [[0, len(tokens), 0, "start"]], "nothing of the other version"


async def test_a_superseded_request_goes_on_where_its_version_is_still_served_and_with_the_same_tokens(scene: Scene) -> None:
    scene.seed()
    await scene.worker("a", engine="synthetic", arguments=SLOW, gateway={"exact_hold_seconds": 0.0})
    client = await scene.gateway()
    whole = (await post(client, count=200)).json()["output_ids"]
    exact = asyncio.create_task(post(client, count=200, weight_version={"exact_version": 0}))
    await until(lambda: scene.workers["a"].worker.busy == 1)
    await scene.worker("pinned", engine="synthetic", subscription="pinned", pinned_version=0)
    version = scene.world.commit(1)
    await scene.world.served(version, "a")
    answer = (await exact).json()
    assert answer.get("output_ids") == whole, repr(answer)
    assert answer["meta_info"]["spans"] == [[0, 200, 0, "start"]]
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    unasked = (await post(client)).json()
    assert unasked["meta_info"]["weight_version_start"] == version, "a pinned replica is for whoever names its version"


async def test_after_a_fork_the_line_decides_and_not_the_numbers(scene: Scene) -> None:
    scene.seed()
    first, second = scene.world.commit(1), scene.world.commit(2)
    await scene.worker(engine="synthetic", version=second)
    client = await scene.gateway()
    scene.world.open(first)
    await scene.world.served(first)
    assert (await post(client, weight_version={"min_version": second})).status_code == 409, "its depth isn't reached any more"
    third = scene.world.commit(3)
    answer = await post(client, wait=20, weight_version={"min_version": second})
    assert answer.json()["meta_info"]["weight_version_start"] == third


async def test_a_replica_that_is_told_to_stop_hands_its_requests_over(scene: Scene) -> None:
    scene.seed()
    await scene.worker("a", engine="synthetic", arguments=SLOW)
    client = await scene.gateway()
    whole = (await post(client, count=100)).json()["output_ids"]
    running = asyncio.create_task(post(client, count=100))
    await until(lambda: scene.workers["a"].worker.busy == 1)
    await scene.worker("b", engine="synthetic")
    scene.workers["a"].worker.drain()
    answer = (await running).json()
    assert answer["output_ids"] == whole
    assert answer["meta_info"]["spans"] == [[0, 100, 0, "start"]]
    assert await scene.workers["a"].ended == "drained"


async def test_a_client_that_leaves_frees_its_slot(scene: Scene) -> None:
    scene.seed()
    worker = (await scene.worker(engine="synthetic", arguments=SLOW)).worker
    client = await scene.gateway()
    async with client.stream("POST", "/generate", json=body(400, stream=True)) as response:
        async for _ in events(response):
            break
        assert worker.busy == 1
    await until(lambda: worker.busy == 0, 3.0)
    waiting = asyncio.create_task(post(client, count=400))
    await until(lambda: worker.busy == 1)
    waiting.cancel()
    await until(lambda: worker.busy == 0, 3.0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_it_waits_for_a_version_leaves_nothing_at_work(scene: Scene, stream: bool) -> None:
    scene.seed()
    await scene.worker(engine="synthetic")
    client = await scene.gateway()

    async def running(count: int) -> bool:
        return bool((await client.get("/server_info")).json()["running"] == count)

    asked = body(4, stream=stream, weight_version={"exact_version": 7})
    waiting = asyncio.create_task(client.post("/generate", json=asked, headers={"Prefer": "wait=100"}))
    await until(lambda: running(1))
    waiting.cancel()
    await until(lambda: running(0))


async def test_a_client_that_leaves_as_its_stream_begins_leaves_nothing_at_work(scene: Scene) -> None:
    scene.seed()
    await scene.worker(engine="synthetic")
    client = await scene.gateway()
    api = scene.service.api
    got = [{"type": "http.request", "body": json.dumps(body(400, stream=True)).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if got:
            return got.pop()
        if api.metering.running and not told:
            told.append("asked")
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    told: list[str] = []
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST", "path": "/generate",
        "headers": [(b"host", b"localhost")],
        "query_string": b"", "root_path": "", "scheme": "http", "server": ("127.0.0.1", 1), "http_version": "1.1",
    }  # fmt: skip
    await api.app()(scope, receive, send)  # type: ignore[arg-type]
    assert told
    assert (await client.get("/server_info")).json()["running"] == 0


async def test_tasks_leave_requests_the_slots_that_are_theirs_and_requests_wait_for_one_otherwise(scene: Scene) -> None:
    scene.seed()
    worker = (await scene.worker(engine="synthetic", slots=4, arguments=SLOW, gateway={"reserved_slots": 1})).worker
    client = await scene.gateway()
    for group in range(6):
        await scene.world.task(group, sampling=_long())
    await until(lambda: worker.busy == 3)
    first = asyncio.create_task(post(client, count=60))
    await until(lambda: worker.busy == 4)
    second = asyncio.create_task(post(client, count=4))
    await asyncio.sleep(0.2)
    assert not second.done()
    assert worker.busy == 4
    assert (await first).status_code == (await second).status_code == 200


async def test_a_session_stays_with_its_replica_and_others_go_where_there_is_room(scene: Scene) -> None:
    scene.seed()
    for name in ("a", "b"):
        await scene.worker(name, engine="synthetic", slots=4, arguments=SLOW)
    client = await scene.gateway()
    running = [asyncio.create_task(post(client, count=200)) for _ in range(4)]
    await until(lambda: sum(one.worker.busy for one in scene.workers.values()) == 4)
    assert [one.worker.busy for one in scene.workers.values()] == [2, 2]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await until(lambda: not any(one.worker.busy for one in scene.workers.values()))
    served = {name: one.worker.report()["requests"]["served"] for name, one in scene.workers.items()}
    for _ in range(6):
        await post(client, count=2, session="mine")
    now = {name: one.worker.report()["requests"]["served"] - served[name] for name, one in scene.workers.items()}
    assert sorted(now.values()) == [0, 6]


def _long() -> Any:
    from towline.contract.task import SamplingParams

    return SamplingParams(max_tokens=400)
