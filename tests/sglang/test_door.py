"""A worker with a real SGLang server behind its door, asked through a gateway: what leaves it, the named version sampled."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

from live.gateway.conftest import LETTERS, Scene, events, scene, spell
from live.worker.world import CONTEXT
from support.waiting import until
from towline.engine.sglang.engine import SglangEngine
from towline.rollout_worker.worker import Worker
from unit.engine.models import plain_logprobs

pytestmark = pytest.mark.sglang
__all__ = ["scene"]
START_SECONDS = 150.0
PROMPT = spell("abc")


class Front:
    """The gateway's client, and the oracle: the models that the versions were published from."""

    def __init__(self, scene: Scene, client: httpx.AsyncClient) -> None:
        self.scene, self.client, self.run = scene, client, scene.world.run
        self.worker: Worker = scene.workers["w"].worker
        engine = self.worker._engine
        assert isinstance(engine, SglangEngine)
        self.engine = engine

    def body(self, count: int, **fields: Any) -> dict[str, Any]:
        sampling = {"max_new_tokens": count, "ignore_eos": True} | fields.pop("sampling_params", {})
        return {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True} | fields

    async def generate(self, count: int, wait: int | None = None, **fields: Any) -> dict[str, Any]:
        headers = {} if wait is None else {"Prefer": f"wait={wait}"}
        answer = await self.client.post("/generate", json=self.body(count, **fields), headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def check(self, answer: dict[str, Any], *versions: int) -> None:
        """Its spans name these versions, divide its tokens, and each token's logprob is its version's model's."""
        meta, tokens = answer["meta_info"], answer["output_ids"]
        rows, spans = meta["output_token_logprobs"], meta["spans"]
        assert [span[2] for span in spans] == list(versions)
        assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])]
        assert spans[-1][1] == len(tokens) == meta["completion_tokens"]
        assert (meta["weight_version"], meta["weight_version_start"], meta["weight_version_end"]) == (
            str(versions[0]), versions[0], versions[-1],
        )  # fmt: skip
        assert [token for _, token, _ in rows] == tokens
        for start, end, version, _ in spans:
            self.check_logprobs(version, PROMPT, tokens, [logprob for logprob, _, _ in rows], start, end)

    def check_logprobs(
        self, version: int, prompt: list[int], tokens: list[int], found: list[float], start: int = 0, end: int | None = None
    ) -> None:
        expected = plain_logprobs(self.scene.world.models[version], prompt + tokens)[len(prompt) - 1 :]
        np.testing.assert_allclose(found[start:end], expected[start:end], rtol=0, atol=1e-4)

    async def idle(self) -> None:
        """No slot is taken, and the server itself has ended every stream."""
        generations = self.engine._generations
        assert generations is not None
        await until(lambda: self.worker.busy == 0 and not generations.runs, 30.0)

    def requests(self) -> Any:
        return self.worker.report()["requests"]


async def test_sglang_behind_a_door_serves_the_gateway_s_routes_by_the_versions_that_they_name(scene: Scene) -> None:
    scene.seed()
    await scene.worker(
        engine="sglang", slots=4, max_context_tokens=CONTEXT, seconds=START_SECONDS, gateway={"exact_hold_seconds": 60.0}
    )
    front = Front(scene, await scene.gateway(rollout={"engine": "sglang", "max_context_tokens": CONTEXT}))
    server = front.engine.server_pid
    await check_generate(front)
    await check_completions(front)
    await check_chat_stream(front)
    await check_refusals(front)
    await check_cancelled(front)
    await check_stop_string(front)
    newer = await check_crossed_activation(front)
    newest = await check_exact_holds(front, newer)
    await check_superseded(front, newest)
    await front.idle()
    assert front.engine.server_pid == server, "nothing that was asked ended the server"


async def check_generate(front: Front) -> None:
    answer = await front.generate(30, rid="mine")
    front.check(answer, 0)
    assert (answer["meta_info"]["id"], answer["meta_info"]["finish_reason"]) == ("mine", {"type": "length", "length": 30})
    assert answer["text"] == "".join(LETTERS[token] if token < len(LETTERS) else f"<{token}>" for token in answer["output_ids"])
    several = await front.client.post("/generate", json=front.body(12, sampling_params={"n": 6}))
    assert len({tuple(one["output_ids"]) for one in several.raise_for_status().json()}) == 6
    for one in several.json():
        front.check(one, 0)


async def check_completions(front: Front) -> None:
    given = {"model": front.run, "prompt": "abc", "max_tokens": 12, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
    answer = (await front.client.post("/v1/completions", json=given)).raise_for_status().json()
    assert (answer["weight_version_start"], answer["weight_version_end"]) == (0, 0)
    (choice,) = answer["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    front.check_logprobs(0, choice["prompt_token_ids"], choice["token_ids"], told["token_logprobs"])


async def check_chat_stream(front: Front) -> None:
    given = {
        "model": front.run, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 60, "ignore_eos": True,
        "logprobs": True, "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with front.client.stream("POST", "/v1/chat/completions", json=given) as response:
        assert response.status_code == 200
        found = [event async for event in events(response)]
    assert found.pop() == "DONE"
    assert all((event["weight_version_start"], event["weight_version_end"]) == (0, 0) for event in found)
    usage = found.pop()["usage"]
    choices = [event["choices"][0] for event in found]
    assert len([choice for choice in choices if choice.get("token_ids")]) > 1, "it came in one piece"
    tokens = [token for choice in choices for token in choice.get("token_ids", [])]
    prompt = next(choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice)
    rows = [row for choice in choices if choice["logprobs"] for row in choice["logprobs"]["content"]]
    content = "".join(choice["delta"].get("content", "") for choice in choices)
    assert prompt == spell("u: abc\na: ")
    assert (len(tokens), choices[-1]["finish_reason"]) == (60, "length")
    assert content == "".join(row["token"] for row in rows)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 60)
    spans = [span for choice in choices for span in choice.get("weight_version_spans", [])]
    assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])]
    front.check_logprobs(0, prompt, tokens, [row["logprob"] for row in rows])


async def check_refusals(front: Front) -> None:
    """What SGLang would serve otherwise than asked, or die of, never reaches it."""
    for change, says in (
        ({"input_ids": [61]}, "token 61 isn't in the model's vocabulary"),
        ({"top_logprobs_num": 3}, "top_logprobs_num"),
        ({"sampling_params": {"max_new_tokens": CONTEXT}}, "over the context"),
    ):
        refused = await front.client.post("/generate", json=front.body(8) | change)
        assert refused.status_code == 400, refused.text
        assert says in refused.json()["error"]["message"]
    chat = {"model": front.run, "messages": [{"role": "user", "content": "abc"}], "logprobs": True, "top_logprobs": 2}
    refused = await front.client.post("/v1/chat/completions", json=chat)
    assert (refused.status_code, "top_logprobs" in refused.json()["error"]["message"]) == (400, True)
    for name in ("abort_request", "pause_generation", "update_weights_from_tensor", "flush_cache"):
        assert (await front.client.post(f"/{name}", json={})).status_code == 403


async def check_cancelled(front: Front) -> None:
    """A client that leaves a stream, or stops waiting for a whole answer, frees the slot and ends the server's stream."""
    await front.idle()
    served = front.requests()["served"]
    async with front.client.stream("POST", "/generate", json=front.body(2000, stream=True)) as response:
        async for event in events(response):
            assert event["output_ids"]
            break
        assert front.worker.busy == 1
    await front.idle()
    whole = asyncio.create_task(front.generate(2000))
    await until(lambda: front.worker.busy == 1)
    whole.cancel()
    await asyncio.gather(whole, return_exceptions=True)
    await front.idle()
    assert front.requests()["served"] == served, "they ran to their end"
    front.check(await front.generate(8), 0)


async def check_stop_string(front: Front) -> None:
    answer = await front.generate(2000, sampling_params={"stop": ["a", "b", "c", "d", "e", "f", "g", "h"]})
    front.check(answer, 0)
    stop = answer["meta_info"]["finish_reason"]["matched"]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert (LETTERS[answer["output_ids"][-1]], stop in answer["text"]) == (stop, False)
    await front.idle()


async def check_crossed_activation(front: Front) -> int:
    """Requests of any newer version go on over an activation; one of the coming version is refused, or waits for it."""
    commit = front.scene.world.stage(1)
    refused = await front.client.post("/generate", json=front.body(8, weight_version={"min_version": 2}))
    assert refused.status_code == 409
    assert {key: refused.json()[key] for key in ("type", "target_version", "applied")} == {
        "type": "WeightVersionNotReady", "target_version": 2, "applied": 0,
    }  # fmt: skip
    crossing = [asyncio.create_task(front.generate(2000, weight_version={"min_version": 0})) for _ in range(3)]
    await until(lambda: front.requests()["tokens"] > 0 and front.worker.busy == 3)
    waiting = asyncio.create_task(front.generate(8, wait=60, weight_version={"exact_version": 2}))
    newer = commit()
    assert newer == 2
    front.check(await waiting, newer)
    for answer in await asyncio.gather(*crossing):
        front.check(answer, 0, newer)
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
    late = await front.client.post("/generate", json=front.body(8, weight_version={"exact_version": 0}))
    assert (late.status_code, late.json()["applied"]) == (409, newer)
    return newer


async def check_exact_holds(front: Front, version: int) -> int:
    exact = asyncio.create_task(front.generate(1000, weight_version={"exact_version": version}))
    await until(lambda: front.worker.busy == 1)
    newest = front.scene.world.commit(3)
    answer = await exact
    front.check(answer, version)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 1000}
    await front.scene.world.served(newest, seconds=60.0)
    return newest


async def check_superseded(front: Front, version: int) -> None:
    """Without a hold the activation cuts it: what it has is its version's to the last token."""
    door = front.worker._door
    assert door is not None
    door._settings = door._settings.model_copy(update={"exact_hold_seconds": 0.0})
    commit = front.scene.world.stage(4)
    before = front.requests()["tokens"]
    exact = asyncio.create_task(front.generate(2000, weight_version={"exact_version": version}))
    await until(lambda: front.requests()["tokens"] > before)
    last = commit()
    answer = await exact
    front.check(answer, version)
    finish = answer["meta_info"]["finish_reason"]
    assert (finish["type"], finish["err_type"], finish["status_code"]) == ("abort", "superseded", 409)
    assert 0 < len(answer["output_ids"]) < 2000
    await front.scene.world.served(last, seconds=60.0)
    front.check(await front.generate(8, weight_version={"min_version": last}), last)
