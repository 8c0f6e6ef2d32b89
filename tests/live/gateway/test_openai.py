"""OpenAI's own client against the gateway: completions and chat, whole and streamed, with the versions in every answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from live.gateway.conftest import Scene, spell
from support.waiting import until
from towline.config import TenantSettings

KEY = "sk-" + "k" * 20


class Clients:
    def __init__(self, http: httpx.AsyncClient, run: str) -> None:
        self.http, self.run = http, run
        self.openai: Any = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture
async def clients(scene: Scene) -> AsyncIterator[Clients]:
    scene.seed()
    await scene.worker()
    http = await scene.gateway(tenants={"me": TenantSettings(token=KEY)})  # type: ignore[arg-type]
    http.headers["Authorization"] = f"Bearer {KEY}"
    found = Clients(http, scene.world.run)
    yield found
    await found.openai.close()


async def test_a_chat_is_rendered_by_the_model_s_template_and_streams_as_it_answers(clients: Clients) -> None:
    asked = {
        "model": clients.run, "messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_tokens": 20,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }  # fmt: skip
    whole = await clients.openai.chat.completions.create(**asked, logprobs=True)
    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert choice.prompt_token_ids == spell("u: hi\na: ")
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (9, 20)
    assert (whole.weight_version_start, whole.weight_version_end) == (0, 0)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(
        [one[0] for one in await _generate(clients, choice.prompt_token_ids, 20)], abs=1e-6
    )
    stream = await clients.openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    pieces = [piece async for piece in stream]
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1]) == choice.message.content
    assert [token for piece in pieces[1:-1] for token in piece.choices[0].token_ids] == choice.token_ids
    assert pieces[-2].choices[0].finish_reason == "length"
    assert pieces[-1].choices == []
    assert pieces[-1].usage == whole.usage
    assert {piece.weight_version_start for piece in pieces[1:]} == {0}


async def _generate(clients: Clients, prompt: list[int], count: int) -> list[list[float]]:
    given = {
        "input_ids": prompt, "return_logprob": True,
        "sampling_params": {"max_new_tokens": count, "sampling_seed": 3, "ignore_eos": True},
    }  # fmt: skip
    answer = (await clients.http.post("/generate", json=given)).raise_for_status().json()
    logprobs: list[list[float]] = answer["meta_info"]["output_token_logprobs"]
    return logprobs


async def test_completions_take_text_and_tokens_several_at_a_time(clients: Clients) -> None:
    common = {"model": clients.run, "max_tokens": 6, "seed": 1, "extra_body": {"ignore_eos": True}}
    text = await clients.openai.completions.create(prompt="abc", n=2, logprobs=1, **common)
    tokens = await clients.openai.completions.create(prompt=[spell("abc"), spell("abc")], **common)
    assert [one.text for one in text.choices] == [one.text for one in tokens.choices]
    assert text.choices[0].text != text.choices[1].text
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == text.choices[0].text
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0
    stream = await clients.openai.completions.create(prompt="abc", n=2, stream=True, **common)
    found = {0: "", 1: ""}
    async for piece in stream:
        found[piece.choices[0].index] += piece.choices[0].text
    assert list(found.values()) == [one.text for one in text.choices]


async def test_models_and_versions_by_name(clients: Clients) -> None:
    listed = [one.id async for one in clients.openai.models.list()]
    assert listed == [clients.run, f"{clients.run}@0"]
    exact = await clients.openai.completions.create(model=f"{clients.run}@0", prompt="abc", max_tokens=2)
    assert exact.weight_version_start == 0
    with pytest.raises(openai.ConflictError) as refused:
        await clients.openai.completions.create(model=f"{clients.run}@7", prompt="abc", max_tokens=2)
    told: Any = refused.value.body
    assert (told["type"], told["target_version"]) == ("WeightVersionNotReady", 7)
    bound = {"weight_version": {"min_version": 9}}
    with pytest.raises(openai.ConflictError):
        await clients.openai.completions.create(model=clients.run, prompt="abc", extra_body=bound, stream=True)
    with pytest.raises(openai.NotFoundError):
        await clients.openai.completions.create(model="gpt", prompt="abc")
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        await clients.openai.chat.completions.create(
            model=clients.run, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=3
        )
    with pytest.raises(openai.AuthenticationError):
        await clients.openai.with_options(api_key="wrong").models.list()


async def test_its_own_retries_bridge_a_time_without_replicas(scene: Scene) -> None:
    scene.seed()
    http = await scene.gateway(ready=False)
    client: Any = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=60)
    starting = scene.worker(engine="synthetic")
    answer, _ = await asyncio.gather(client.completions.create(model=scene.world.run, prompt="abc", max_tokens=2), starting)
    assert answer.choices[0].finish_reason == "length"
    await client.close()
    await until(lambda: scene.workers["w"].worker.busy == 0)
