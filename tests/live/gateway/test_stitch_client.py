"""A client of the external rollout service contract, which miles and Stitch share: raw requests, its sentences in turn."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from live.gateway.conftest import Scene, events, spell
from support.waiting import until

ENGINE_CONTROL = (
    "pull_weights", "update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_distributed",
    "init_weights_update_group", "begin_weight_update", "end_weight_update", "pause_generation", "continue_generation",
    "flush_cache", "abort_request", "release_memory_occupation", "resume_memory_occupation",
)  # fmt: skip
"""What a trainer would call on an engine that it holds itself."""
BOUNDS: tuple[dict[str, Any], ...] = (
    {}, {"weight_version": {"min_version": 0}}, {"weight_version": {"exact_version": 0}},
    {"weight_version": {"min_version": None, "exact_version": 0}},
)  # fmt: skip
"""What a request may say before the first version is followed by another."""
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")


def body(route: str, run: str, count: int = 6, **fields: Any) -> dict[str, Any]:
    if route == "/generate":
        sampling = {"max_new_tokens": count, "temperature": 1.0, "ignore_eos": True}
        return {"input_ids": spell("abc"), "sampling_params": sampling, "return_logprob": True} | fields
    asked = {"prompt": "abc"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "abc"}]}
    return {"model": run, "max_tokens": count, "ignore_eos": True} | asked | fields


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_versions(route: str, answer: dict[str, Any], start: int, end: int) -> None:
    """Where the contract has them, as the types that it has."""
    place = answer["meta_info"] if route == "/generate" else answer
    assert (place["weight_version_start"], place["weight_version_end"]) == (start, end)
    assert is_int(place["weight_version_start"])
    assert is_int(place["weight_version_end"])
    if route == "/generate":
        assert place["weight_version"] == str(start)


def check_generated(answer: dict[str, Any], count: int) -> None:
    meta, tokens = answer["meta_info"], answer["output_ids"]
    assert len(tokens) == count
    assert all(is_int(token) for token in tokens)
    assert isinstance(meta["id"], str)
    assert meta["finish_reason"] == {"type": "length", "length": count}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, count)
    assert is_int(meta["cached_tokens"])
    assert [token for _, token, _ in meta["output_token_logprobs"]] == tokens
    assert all(isinstance(logprob, float) and logprob <= 0 for logprob, _, _ in meta["output_token_logprobs"])


async def check_stream(client: httpx.AsyncClient, route: str, given: dict[str, Any], version: int) -> None:
    """Each event names the version, so a client that stops reading knows it too."""
    async with client.stream("POST", route, json=given | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        found = [event async for event in events(response)]
    assert found.pop() == "DONE"
    assert found
    for event in found:
        check_versions(route, event, version, version)


def check_no_engine(response: httpx.Response) -> None:
    assert response.status_code == 503, response.text
    assert int(response.headers["retry-after"]) >= 1
    error = response.json()["error"]
    assert (error["type"], error["retryable"]) == ("EngineUnavailable", True)


def check_not_ready(response: httpx.Response, target: int, applied: int) -> None:
    assert response.status_code == 409, response.text
    assert response.headers["content-type"] == "application/json"
    found = response.json()
    assert set(found) == {"type", "target_version", "applied", "message"}
    assert (found["type"], found["target_version"], found["applied"]) == ("WeightVersionNotReady", target, applied)
    assert is_int(found["target_version"])
    assert is_int(found["applied"])
    assert isinstance(found["message"], str)
    assert found["message"]


async def patient(client: httpx.AsyncClient, route: str, given: dict[str, Any], refused: list[httpx.Response]) -> dict[str, Any]:
    """The contract's client: what isn't there yet is asked for again, after as long as the answer says."""
    for _ in range(40):
        response = await client.post(route, json=given)
        if response.status_code not in (409, 503):
            return response.raise_for_status().json()  # type: ignore[no-any-return]
        refused.append(response)
        await asyncio.sleep(float(response.headers["retry-after"]))
    raise AssertionError(f"refused to the end: {refused[-1].text}")


async def test_a_client_of_the_external_rollout_contract_is_served_unchanged(scene: Scene) -> None:
    scene.seed()
    client = await scene.gateway(ready=False)
    run = scene.world.run

    async def health(status: int) -> bool:
        return (await client.get("/health")).status_code == status

    # Before there is an engine
    check_no_engine(await client.get("/health"))
    check_no_engine(await client.post("/wake"))
    for route in ROUTES:
        for wanted in BOUNDS:
            given = body(route, run) | wanted
            check_no_engine(await client.post(route, json=given))
            check_no_engine(await client.post(route, json=given | {"stream": True}))
    early: list[httpx.Response] = []
    waiting = asyncio.create_task(patient(client, "/generate", body("/generate", run), early))
    await until(lambda: bool(early))
    await scene.worker(engine="synthetic", arguments={"tokens_per_second": 60.0})
    check_versions("/generate", await waiting, 0, 0)
    assert {one.status_code for one in early} == {503}

    # An engine serves
    await until(lambda: health(200))
    assert (await client.post("/wake")).status_code == 200
    assert (await client.post("/wake", json={})).status_code == 200
    info = (await client.get("/server_info")).raise_for_status().json()
    assert (info["applied"], info["latest_version"], [one["version"] for one in info["replicas"]]) == (0, 0, [0])
    for route in ROUTES:
        for wanted in BOUNDS:
            given = body(route, run) | wanted
            answer = (await client.post(route, json=given)).raise_for_status().json()
            check_versions(route, answer, 0, 0)
            if route == "/generate":
                check_generated(answer, 6)
            await check_stream(client, route, given, 0)

    # Nobody controls an engine through it
    for name in ENGINE_CONTROL:
        for path in (f"/{name}", f"/{name}?weight_version=9"):
            assert (await client.post(path, json={"weight_version": "9", "model_path": "/x"})).status_code == 403
    assert (await client.get("/server_info")).json()["applied"] == 0

    # A version that isn't applied yet; the newer one comes while a request runs and while others wait for it
    commit = scene.world.stage(1)
    newer = 2
    for route in ROUTES:
        for name in ("min_version", "exact_version"):
            given = body(route, run, weight_version={name: newer})
            check_not_ready(await client.post(route, json=given), newer, 0)
            check_not_ready(await client.post(route, json=given | {"stream": True}), newer, 0)
    running = asyncio.create_task(client.post("/generate", json=body("/generate", run, 400, weight_version={"min_version": 0})))
    await until(lambda: scene.workers["w"].worker.busy == 1)
    refused: dict[str, list[httpx.Response]] = {route: [] for route in ROUTES}
    loops = [
        asyncio.create_task(patient(client, route, body(route, run, weight_version={"min_version": newer}), refused[route]))
        for route in ROUTES
    ]
    await until(lambda: all(refused.values()))
    assert commit() == newer
    for route, loop in zip(ROUTES, loops, strict=True):
        check_versions(route, await loop, newer, newer)
        assert {one.status_code for one in refused[route]} == {409}
    crossed = (await running).raise_for_status().json()
    check_generated(crossed, 400)
    check_versions("/generate", crossed, 0, newer)
    check_not_ready(await client.post("/generate", json=body("/generate", run, weight_version={"exact_version": 0})), 0, newer)
    assert (await client.get("/server_info")).json()["applied"] == newer

    # The engine is gone
    await scene.workers["w"].kill()
    await until(lambda: health(503), 30.0)
    check_no_engine(await client.get("/health"))
    check_no_engine(await client.post("/wake"))
    for route in ROUTES:
        check_no_engine(await client.post(route, json=body(route, run)))
