"""Tool calls and streamed turns through a whole gateway, with Qwen's vocabulary: an engine says what the test wants, and its own
calls are the oracle of what it saw."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from live.gateway.conftest import Scene, events
from support.real_tokenizers import QWEN, _converted, real
from support.waiting import until
from towline.contract.task import VersionSpan
from towline.engine.base import GenerateRequest, Generation, Progress

TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '{"name": "add", "arguments": {"a": 12,  "b": "größe"}}'
CALLING = f"Let me see.\n\n<tool_call>\n{CALL}\n</tool_call>"


class Actor:
    """Has the engine say `lines`, one a request, four tokens at a time. `seen`: the prompts. `gate` holds back the end."""

    def __init__(self, engine: Any, *lines: str) -> None:
        self.tokenizer = real("qwen")
        self.end = self.tokenizer.token_to_id("<|im_end|>")
        self.lines, self.seen, self.said = list(lines), list[list[int]](), list[list[int]]()
        self.gate = asyncio.Event()
        self.gate.set()
        engine.generate = self._generate

    async def _generate(self, request: GenerateRequest) -> Generation:
        self.seen.append(list(request.tokens))
        assert self.end is not None
        tokens = [*self.tokenizer.encode(self.lines.pop(0), add_special_tokens=False), self.end]
        self.said.append(tokens)
        for count in range(4, len(tokens), 4):
            if request.on_progress is not None:
                request.on_progress(Progress(**sampled(tokens[:count])))
            await asyncio.sleep(0.01)
        await self.gate.wait()
        return Generation(**sampled(tokens), finish="stop")


def sampled(tokens: list[int]) -> dict[str, Any]:
    spans = [VersionSpan(0, len(tokens), 0, "start")]
    return dict(tokens=tokens, logprobs=[-0.5] * len(tokens), spans=spans, queue_seconds=0.0, generate_seconds=0.0)


async def stage(scene: Scene, *lines: str) -> tuple[Actor, httpx.AsyncClient]:
    folder = scene.world.folder / "base"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(_converted("qwen"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": QWEN, "eos_token": "<|im_end|>"}))
    scene.world.seed()
    worker = await scene.worker(engine="synthetic")
    client = await scene.gateway()
    return Actor(worker.worker._engine, *lines), client


async def streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str) -> list[Any]:
    async with client.stream("POST", path, json=body | {"stream": True}, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        return [event async for event in events(response)]


def put_together(found: list[Any]) -> dict[str, Any]:
    """The message that a stream's deltas make."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for event in found:
        for choice in event["choices"] if event != "DONE" else ():
            delta = choice["delta"]
            if delta.get("content"):
                message["content"] = (message["content"] or "") + delta["content"]
            for call in delta.get("tool_calls", ()):
                message.setdefault("tool_calls", []).append({key: value for key, value in call.items() if key != "index"})
    return message


async def test_an_openai_client_gets_tool_calls_whole_and_streamed_and_text_where_no_tools_were_told(scene: Scene) -> None:
    broken = CALLING.replace("}}", "}")
    actor, http = await stage(scene, CALLING, CALLING, CALLING, CALLING, broken, "The sum.")
    user: Any = {"role": "user", "content": "add them"}
    async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="-", max_retries=0) as client:
        ask: Any = client.chat.completions.create
        whole = await ask(model=scene.world.run, messages=[user], tools=TOOLS)
        message = whole.choices[0].message
        assert whole.choices[0].finish_reason == "tool_calls"
        assert message.content == "Let me see."
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 12, "b": "größe"})
        assert '"add"' in actor.tokenizer.decode(actor.seen[0]), "the template was told the tools"
        stream = await ask(model=scene.world.run, messages=[user], tools=TOOLS, stream=True)
        chunks = [chunk.model_dump() async for chunk in stream]
        told = put_together(
            [{"choices": [{"delta": {k: v for k, v in c["delta"].items() if v}} for c in chunk["choices"]]} for chunk in chunks]
        )
        assert (told["content"], told["tool_calls"][0]["function"]) == (message.content, call.function.model_dump())
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert len(chunks) > 2
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            plain = (await ask(model=scene.world.run, messages=[user], **fields)).choices[0]
            assert (plain.message.content, plain.message.tool_calls, plain.finish_reason) == (CALLING, None, "stop")
            assert '"add"' not in actor.tokenizer.decode(actor.seen[-1])
        text = (await ask(model=scene.world.run, messages=[user], tools=TOOLS)).choices[0]
        assert (text.message.content, text.message.tool_calls, text.finish_reason) == (broken, None, "stop")
        answered: Any = [user, message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "24"}]
        last = await ask(model=scene.world.run, messages=answered, tools=TOOLS)
        assert last.choices[0].message.content == "The sum."
        assert "<tool_response>\n24" in actor.tokenizer.decode(actor.seen[-1])
        for odd in ([{"role": "user"}], [{"role": "tool", "tool_call_id": "a"}], [user, {"role": "assistant"}]):
            with pytest.raises(openai.BadRequestError, match="needs content"):
                await ask(model=scene.world.run, messages=odd, tools=TOOLS)


@pytest.mark.parametrize("told", [True, False], ids=["tools", "no-tools"])
async def test_a_client_that_sends_parsed_calls_back_goes_on_from_the_sampled_tokens(scene: Scene, told: bool) -> None:
    actor, client = await stage(scene, CALLING, "It is 24.")
    name = (await client.post("/sessions", json={"tools": TOOLS} if told else {})).json()["id"]
    path, user = f"/sessions/{name}/v1/chat/completions", {"role": "user", "content": "add them"}
    found = await streamed(client, path, {"model": scene.world.run, "messages": [user]})
    assert found[-1] == "DONE"
    message = put_together(found)
    if told:
        assert message["content"] == "Let me see."
        assert found[-2]["choices"][0]["finish_reason"] == "tool_calls"
    else:  # the client takes the calls out itself, and spells them as it likes
        assert message["content"] == CALLING
        tree = json.loads(CALL)
        call = {"id": "x", "type": "function", "function": {"name": tree["name"], "arguments": json.dumps(tree["arguments"])}}
        message = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    assert [("session" in event) for event in found[:-1]] == [False] * (len(found) - 2) + [True], "kept, then said so"
    view = (await client.get(f"/sessions/{name}")).json()
    assert found[-2]["session"]["node"] == view["head"]
    assert view["tokens"] == actor.seen[0] + actor.said[0]
    assert view["nodes"][1]["messages"] == [put_together(found)], "as it was told"
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "24"}
    again = await client.post(path, json={"model": scene.world.run, "messages": [user, message, result]})
    assert again.json()["session"]["mismatches"] == {}
    assert actor.seen[1][: len(view["tokens"])] == view["tokens"], "the stored tokens, not the template's of the parsed call"
    assert "24" in actor.tokenizer.decode(actor.seen[1][len(view["tokens"]) :])
    after = (await client.get(f"/sessions/{name}")).json()
    assert [node["kind"] for node in after["nodes"]] == ["prompt", "policy", "tool", "policy"]
    edited = message | {"content": "I looked."}
    actor.lines.append("Then.")
    said = (await client.post(path, json={"model": scene.world.run, "messages": [user, edited, result]})).json()
    assert said["session"]["mismatches"] == {"edited": 1}


async def test_of_two_streamed_turns_at_once_one_ends_with_an_error_and_has_changed_nothing(scene: Scene) -> None:
    actor, client = await stage(scene, "one two three four five six", "seven eight nine ten eleven", "again")
    name = (await client.post("/sessions", json={})).json()["id"]
    path = f"/sessions/{name}/v1/chat/completions"
    body = {"model": scene.world.run, "messages": [{"role": "user", "content": "count"}]}
    actor.gate.clear()
    both = [asyncio.create_task(streamed(client, path, body)) for _ in range(2)]
    await until(lambda: len(actor.seen) == 2)
    actor.gate.set()
    ends = [await one for one in both]
    good, bad = sorted(ends, key=lambda end: end[-1] != "DONE")
    assert good[-1] == "DONE"
    assert bad[-1]["error"]["type"] == "SessionConflict"
    assert all("session" not in event for event in bad)
    assert all(choice["finish_reason"] is None for event in bad[:-1] for choice in event["choices"])
    view = (await client.get(f"/sessions/{name}")).json()
    assert [node["kind"] for node in view["nodes"]] == ["prompt", "policy"]
    assert view["nodes"][1]["messages"][0]["content"] == put_together(good)["content"]


async def test_a_streamed_turn_that_broke_goes_on_under_its_key_with_the_same_tokens_once(scene: Scene) -> None:
    actor, client = await stage(scene, "one two three four five six seven eight nine ten", "later")
    name = (await client.post("/sessions", json={})).json()["id"]
    path = f"/sessions/{name}/v1/chat/completions"
    body = {"model": scene.world.run, "messages": [{"role": "user", "content": "count"}], "max_tokens": 40, "stream": True}
    headers = {"Idempotency-Key": "turn"}
    told = ""
    async with client.stream("POST", path, json=body, headers=headers) as response:
        async for event in events(response):
            if event != "DONE":
                told += event["choices"][0]["delta"].get("content") or ""
            if event == "DONE" or len(told) > 8:
                break
    assert (await client.get(f"/sessions/{name}")).json()["turns"] == 0, "not kept: nothing has ended"
    prefix = actor.said[0]
    actor.lines[:0] = ["ignored"]

    async def resumed(request: GenerateRequest) -> Generation:
        rest = prefix[request.position0 :]
        actor.seen.append(list(request.tokens))
        return Generation(**sampled(rest), finish="stop")

    scene.workers["w"].worker._engine.generate = resumed  # type: ignore[method-assign]
    for _ in range(2):
        found = await streamed(client, path, {key: value for key, value in body.items() if key != "stream"}, **headers)
        assert found[-1] == "DONE"
        content = put_together(found)["content"]
        assert content.startswith(told)
        assert content == "one two three four five six seven eight nine ten"
    assert actor.seen[-1][-4:] != actor.seen[0][-4:], "it went on from what stood"
    view = (await client.get(f"/sessions/{name}")).json()
    assert view["turns"] == 1
    assert view["tokens"] == actor.seen[0] + prefix
