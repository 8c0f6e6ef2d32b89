"""The routes over real doors: what comes back is what the engine sampled, with the versions that sampled it."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any

import pytest

from live.gateway.conftest import EOS, LETTERS, Scene, events, spell
from support.waiting import until
from towline.config import TenantSettings
from unit.engine.models import plain_logprobs


def body(prompt: str = "abc", **sampling: Any) -> dict[str, Any]:
    return {
        "input_ids": spell(prompt),
        "sampling_params": {"max_new_tokens": 12, "sampling_seed": 5, "ignore_eos": True} | sampling,
    }


async def test_generate_answers_as_sglang_does_and_its_logprobs_are_the_model_s(scene: Scene) -> None:
    scene.seed()
    await scene.worker()
    client = await scene.gateway()
    answer = (await client.post("/generate", json=body() | {"return_logprob": True, "rid": "mine"})).raise_for_status().json()
    meta, tokens = answer["meta_info"], answer["output_ids"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 3, 12)
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["weight_version"], meta["weight_version_start"], meta["weight_version_end"]) == ("0", 0, 0)
    assert meta["spans"] == [[0, 12, 0, "start"]]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == tokens
    expected = plain_logprobs(scene.world.models[0], spell("abc") + tokens)[2:]
    assert [logprob for logprob, _, _ in meta["output_token_logprobs"]] == pytest.approx(expected, abs=1e-3)
    assert answer["text"] == "".join(LETTERS[token] if token < len(LETTERS) else f"<{token}>" for token in tokens)
    again = (await client.post("/generate", json=body())).json()
    assert again["output_ids"] == tokens, "the seed alone decides"


async def test_a_stream_s_events_add_up_to_the_whole_answer(scene: Scene) -> None:
    scene.seed()
    await scene.worker()
    client = await scene.gateway()
    whole = (await client.post("/generate", json=body())).json()
    async with client.stream("POST", "/generate", json=body() | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        found = [event async for event in events(response)]
    assert found.pop() == "DONE"
    assert len(found) > 1
    assert found[-1]["output_ids"] == whole["output_ids"]
    assert found[-1]["text"] == whole["text"]
    for one, later in itertools.pairwise(found):
        assert later["output_ids"][: len(one["output_ids"])] == one["output_ids"]
    new = body() | {"stream": True, "incremental_streaming_output": True}
    async with client.stream("POST", "/generate", json=new) as response:
        pieces = [event async for event in events(response)][:-1]
    assert [token for one in pieces for token in one["output_ids"]] == whole["output_ids"]
    spans = [span for one in pieces for span in one["meta_info"]["spans"]]
    assert [span[0] for span in spans[1:]] == [span[1] for span in spans[:-1]]
    assert (spans[0][0], spans[-1][1]) == (0, 12)


async def test_several_prompts_and_samples_come_in_order_and_differ(scene: Scene) -> None:
    scene.seed()
    await scene.worker()
    client = await scene.gateway()
    given = {"text": ["abc", "xyz"], "sampling_params": {"max_new_tokens": 8, "n": 2, "sampling_seed": 1, "ignore_eos": True}}
    found = (await client.post("/generate", json=given)).json()
    assert [one["meta_info"]["prompt_tokens"] for one in found] == [3, 3, 3, 3]
    assert len({tuple(one["output_ids"]) for one in found}) == 4
    alone = (await client.post("/generate", json=body(max_new_tokens=8, sampling_seed=1))).json()
    assert alone["output_ids"] == found[0]["output_ids"], "the first one has the request's seed"


async def test_a_stop_string_ends_text_and_tokens_where_it_stands(scene: Scene) -> None:
    scene.seed()
    await scene.worker()
    client = await scene.gateway()
    whole = (await client.post("/generate", json=body(max_new_tokens=40))).json()
    stop = whole["text"][20:22]
    at = whole["text"].index(stop)
    cut = (await client.post("/generate", json=body(max_new_tokens=40, stop=[stop]))).json()
    assert cut["text"] == whole["text"][:at]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert cut["output_ids"] == whole["output_ids"][: len(cut["output_ids"])]
    assert len(cut["output_ids"]) <= len(whole["text"][: at + 2])
    kept = (await client.post("/generate", json=body(max_new_tokens=40, stop=stop, no_stop_trim=True))).json()
    assert kept["text"] == whole["text"][: at + 2]
    await until(lambda: scene.workers["w"].worker.busy == 0)


async def test_the_end_token_ends_a_sample_unless_it_is_ignored(scene: Scene) -> None:
    scene.seed()
    await scene.worker(engine="synthetic", arguments={"mean_tokens": 10})
    client = await scene.gateway()
    found = (await client.post("/generate", json=body(max_new_tokens=100, ignore_eos=False))).json()
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert found["output_ids"][-1] == EOS
    assert EOS not in found["output_ids"][:-1]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
    ({"sampling_params": {"frequency_penalty": 0.5}}, "only 0.0 is supported"),
    ({"sampling_params": {"max_new_tokens": 600}}, "over the context of 512"),
    ({"sampling_params": {"temperature": -1}}, "temperature"),
    ({"sampling_params": {"stop": [""]}}, "stop"),
    ({"weight_version": {"min_version": 1, "exact_version": 1}}, "not both"),
    ({"nonsense": 1}, "nonsense"),
    ({"input_ids": [61]}, "token 61 isn't in the model's vocabulary"),
    ({"input_ids": [1] * 512}, "no room"),
    ({"input_ids": []}, "input_ids"),
    ({"text": "abc"}, "not both"),
    ({"sampling_params": {"n": 65}}, "gateway.max_choices"),
]


async def test_bad_input_is_refused_in_one_line(scene: Scene) -> None:
    scene.seed()
    await scene.worker()
    client = await scene.gateway()
    for change, says in BAD:
        response = await client.post("/generate", json=body() | change)
        assert response.status_code == 400, response.text
        message = response.json()["error"]["message"]
        assert says in message
        assert "\n" not in message


async def test_what_is_no_body_or_too_much_of_one_and_routes_that_are_none(scene: Scene) -> None:
    scene.seed(text=False)
    await scene.worker(engine="synthetic")
    client = await scene.gateway(max_body_bytes=1000)
    assert (await client.post("/generate", content=b"\xff{")).status_code == 400
    assert (await client.post("/generate", content=b"[" * 900)).status_code == 400
    assert (await client.post("/generate", json={"input_ids": [1] * 1000})).status_code == 413

    async def parts() -> Any:
        for _ in range(100):
            yield b"x" * 100

    assert (await client.post("/generate", content=parts())).status_code == 413
    assert (await client.post("/update_weights_from_disk", json={})).status_code == 403
    assert (await client.get("/nowhere")).status_code == 404
    assert (await client.get("/generate")).status_code == 405
    response = await client.post("/generate", json={"text": "abc"})
    assert response.status_code == 400
    assert "no tokenizer" in response.json()["error"]["message"]


async def test_tenants_need_their_token_and_keep_to_their_limits(scene: Scene) -> None:
    scene.seed(text=False)
    await scene.worker(engine="synthetic", arguments={"tokens_per_second": 200.0})
    tenants = {
        "one": TenantSettings(token="a" * 20, requests_per_minute=3),  # type: ignore[arg-type]
        "two": TenantSettings(token="b" * 20, concurrent=1),  # type: ignore[arg-type]
    }
    client = await scene.gateway(tenants=tenants)

    async def send(token: str, count: int = 1) -> Any:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        given = {"input_ids": [1], "sampling_params": {"max_new_tokens": count}}
        return await client.post("/generate", json=given, headers=headers)

    for wrong in ("", "c" * 20, "a" * 19, "é" * 3):
        response = await send(wrong.encode().decode("latin-1")) if wrong != "é" * 3 else await send("zzz")
        assert response.status_code == 401, wrong
    assert (await client.get("/v1/models")).status_code == 401
    assert (await client.get("/health")).status_code == 200, "probes need none"
    assert [(await send("a" * 20)).status_code for _ in range(3)] == [200] * 3
    over = await send("a" * 20)
    assert (over.status_code, int(over.headers["retry-after"]) > 0) == (429, True)
    long = asyncio.create_task(send("b" * 20, 100))
    worker = scene.workers["w"].worker
    await until(lambda: worker.busy == 1)
    assert (await send("b" * 20)).status_code == 429
    assert (await long).status_code == 200
    assert (await send("b" * 20)).status_code == 200


async def test_it_tells_of_itself(scene: Scene) -> None:
    scene.seed()
    client = await scene.gateway(ready=False)
    refused = await client.post("/generate", json=body())
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "EngineUnavailable")
    assert refused.json()["error"]["retryable"] is True
    assert int(refused.headers["retry-after"]) >= 1
    assert (await client.get("/health")).status_code == 503
    await scene.worker(engine="synthetic")

    async def ready() -> bool:
        return (await client.get("/ready")).status_code == 200

    await until(ready)
    run = scene.world.run
    listed = (await client.get("/v1/models")).json()["data"]
    assert [(one["id"], one["weight_versions"]) for one in listed] == [(run, [0]), (f"{run}@0", [0])]
    info = (await client.get("/server_info")).json()
    assert (info["latest_version"], info["applied"], info["versions"]) == (0, 0, {"0": 1})
    await client.post("/generate", json=body())
    assert b'towline_gateway_requests_total{route="/generate",status="200"} 1.0' in (await client.get("/metrics")).content


async def test_what_anybody_asks_for_adds_no_series_to_its_metrics(scene: Scene) -> None:
    scene.seed()
    await scene.worker(engine="synthetic")
    client = await scene.gateway(tenants={"me": TenantSettings(token="s" * 20)})
    for path in ("/sessions/a%3Fb", "/sessions/a%2523b", "/sessions/a%20b", "/sessions/s", "/sessions/c/finish", "/nowhere/d"):
        await client.get(path, headers={"Host": "x/elsewhere"})
        await client.post(path)
    page = (await client.get("/metrics", headers={"Authorization": f"Bearer {'s' * 20}"})).text
    routes = set(re.findall(r'requests_total{route="([^"]*)"', page))
    assert routes == {"/sessions/{session}", "/sessions/{session}/finish"}


async def test_without_tenants_no_page_of_another_name_gets_through(scene: Scene) -> None:
    scene.seed()
    await scene.worker(engine="synthetic")
    client = await scene.gateway()
    for headers in (
        {"Host": "evil.example"},
        {"Host": "evil.example:8100"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ):
        for answer in (
            await client.get("/server_info", headers=headers),
            await client.post("/generate", json=body(), headers=headers),
        ):
            assert answer.status_code == 403, (headers, answer.text)
    for headers in ({}, {"Host": "localhost:1"}, {"Host": "[::1]:1"}, {"Origin": "http://127.0.0.1:5173"}):
        assert (await client.post("/generate", json=body(), headers=headers)).status_code == 200, headers
    assert (await client.get("/health", headers={"Host": "evil.example"})).status_code == 200
