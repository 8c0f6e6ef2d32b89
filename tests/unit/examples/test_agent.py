"""examples/agent: its tokenizer, template and calls are such as sessions need, its reward judges what the agent's tool said, and
the loop talks, calls and finishes as an OpenAI client does."""

from __future__ import annotations

import importlib
import json
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from towline.contract.task import PromptRef
from towline.gateway.tool_calls import Reader, form_of
from towline.session.families import boundary_of
from towline.verifiers.base import Sample
from towline.verifiers.model_tokenizer import prompt_tokenizer, stop_tokens

FOLDER = str(Path(__file__).parents[3] / "examples" / "agent")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's modules by name; other examples have a `task` of their own."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("task", "small_model", "agent"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in ("task", "small_model", "agent"):
        sys.modules.pop(name, None)


def judged(task: Any, turns: list[tuple[list[int], int]], value: str = "82", finish: str = "stop") -> Any:
    tokens, mine = [token for part, _ in turns for token in part], [own for part, own in turns for _ in part]
    return task.reward(
        Sample(
            prompt_tokens=np.array([1], np.int32), response_tokens=np.array(tokens, np.int32),
            policy_mask=np.array(mine, bool), finish=finish, reference={"question": "37+45", "value": value},
            prompt_ref=PromptRef("s", 0, 0), tokenizer=None, group=0, sample=0,
        )  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_prompt_and_the_calls_are_what_sessions_make_of_messages(modules: Any, tmp_path: Path) -> None:
    task, small_model = modules("task"), modules("small_model")
    small_model.build(tmp_path, 0, warm_up_steps=1)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    tokenizer = prompt_tokenizer(files)
    assert stop_tokens(files) == (task.END,)
    boundary = boundary_of(tokenizer, stop_tokens(files))
    prompt = task.prompts(None, 0).get(0, 3)
    assert boundary.opening([{"role": "user", "content": prompt.reference["question"]}], None) == prompt.tokens
    tokens, mine = small_model._row(random.Random(1), 0.0)
    call = [token for token, own in zip(tokens, mine, strict=True) if own][:10]
    (found,) = Reader(form_of(tokenizer), frozenset(["calculator"])).parse(tokenizer.decode(call, skip_special_tokens=True)).calls  # type: ignore[union-attr,arg-type]
    agent = modules("agent")
    value = agent.calculated(found.arguments)
    assert sum(map(int, json.loads(found.arguments)["expression"].split("+"))) == int(value)
    between = boundary.next(call, [{"role": "tool", "content": value}])
    assert tokens[tokens.index(call[0]) :] == [*call, *between, *task.spell(value), task.END]


def test_the_reward_is_half_for_the_right_call_and_half_for_the_right_answer(modules: Any) -> None:
    task = modules("task")
    said = [8, 10, 14, 11, 9, task.END]

    def told(value: str) -> list[int]:
        return [7, task.START, task.ID["tool\n"], *task.spell(value), task.END, 7, task.START, task.ID["assistant\n"]]

    def answer(value: str) -> list[int]:
        return [*task.spell(value), task.END]

    assert judged(task, [(said, 1), (told("82"), 0), (answer("82"), 1)]).value == 1.0
    assert judged(task, [(said, 1), (told("82"), 0), (answer("81"), 1)]).value == 0.75
    assert judged(task, [(said, 1), (told("83"), 0), (answer("83"), 1)]).value == 0.25
    assert judged(task, [(said, 1), (told("83"), 0), (answer("82"), 1)]).components == {"called": 0.0, "exact": 0.0}
    assert judged(task, [(said, 1), (told("82"), 0), (answer("822"), 1)]).value == 0.5
    assert judged(task, [(said, 1), (told("82"), 0), (task.spell("82"), 1)], finish="length").value == 0.5
    assert judged(task, [(answer("82"), 1)]).value == 0.0, "without the tool"
    assert judged(task, [([*said, *told("82"), *answer("82")], 1)]).value == 0.0, "a result that the policy wrote itself"


class Gateway(BaseHTTPRequestHandler):
    """A stand-in: nothing to claim, then one task, then it's gone."""

    seen: ClassVar[list[tuple[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self.seen.append((self.path, body))
        claims = sum(path == "/tasks/claim" for path, _ in self.seen)
        if self.path == "/sessions/s/finish":
            self._answer(200, {})
        elif self.path != "/tasks/claim":
            self._answer(200, self._turn(body["messages"]))
        elif claims == 1:
            self._answer(204, None, ("Retry-After", "0"))
        elif claims == 2:
            self._answer(201, {"id": "s", "base_url": "/sessions/s/v1", "model": "run", "reference": {"question": "37+45"}})
        else:
            self.close_connection = True

    def _turn(self, messages: list[Any]) -> dict[str, Any]:
        said: dict[str, Any] = {"role": "assistant", "content": "82"}
        if len(messages) == 1:
            function = {"name": "calculator", "arguments": '{"expression": "37+45"}'}
            said = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
        choice = {"index": 0, "finish_reason": "stop", "message": said}
        return {"id": "c", "object": "chat.completion", "created": 1, "model": "run", "choices": [choice]}

    def _answer(self, status: int, tree: Any, *headers: tuple[str, str]) -> None:
        data = b"" if tree is None else json.dumps(tree).encode()
        self.send_response(status)
        for name, value in (*headers, ("Content-Type", "application/json"), ("Content-Length", str(len(data)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


async def test_the_agent_calls_its_tool_and_finishes_until_the_gateway_is_gone(modules: Any) -> None:
    Gateway.seen.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mine = modules("agent").Agent(f"http://127.0.0.1:{server.server_port}", conversations=1)
        await mine.run()
        server.shutdown()
    turns = [body["messages"] for path, body in Gateway.seen if path == "/sessions/s/v1/chat/completions"]
    assert [len(messages) for messages in turns] == [1, 3]
    assert turns[1][2] == {"role": "tool", "tool_call_id": "1", "content": "82"}
    assert mine.counts == {"no task (204)": 1, "turns": 2, "calls": 1, "finished": 1}
