"""python -m towline.loadtest.clients: clients of a gateway in one process. JSON in, JSON out: its plan, and each call of theirs.

Closed loop: each client sends its next request when it has the answer. Open loop: requests go out at their time, whatever
became of those before. Sessions: each client opens or claims one, takes its turns, finishes it, and begins anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import astuple, dataclass, field
from typing import Any, Literal

import msgspec
import uvloop

from towline.engine.synthetic import IDLE_SEED
from towline.loadtest.client_figures import OK, Call
from towline.loadtest.ends import intended
from towline.loadtest.gateway_model import words
from towline.loadtest.http_client import Client

CHAT = "/v1/chat/completions"
OPENED_TOGETHER = 64
MOST_PAUSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one process is told. `lanes`: (tenant, token, clients)."""

    role: str = "client"
    system: str
    mode: Literal["closed", "open", "sessions"]
    urls: list[str]
    grpc: list[str] = field(default_factory=list)
    """Addresses: by gRPC instead of HTTP."""
    model: str
    lanes: list[tuple[str, str, int]]
    seconds: float
    rate: float = 0.0
    seed: int
    streamed: float
    prompt_tokens: int
    output_tokens: int
    timeout_seconds: float
    idle: int = 0
    turns: int = 4
    claims: bool = False


class Asker:
    """Makes calls, and keeps what came of them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.calls: list[Call] = []
        self._words = words()[16:]
        self._number = 0

    def next_seed(self) -> int:
        """Of this process's next request: lengths follow from it, so another system that gets the same plan gets the same."""
        self._number += 1
        return random.Random(f"{self.plan.seed}/{self._number}").randrange(IDLE_SEED)

    def text(self, seed: int) -> str:
        return "".join(random.Random(seed).choices(self._words, k=max(self.plan.prompt_tokens, 1)))

    async def once(self, client: Client, tenant: str, meant: float = 0.0) -> None:
        """One chat of one turn."""
        seed = self.next_seed()
        streamed = random.Random(f"streamed/{seed}").random() < self.plan.streamed
        messages = [{"role": "user", "content": self.text(seed)}]
        await self.chat(client, tenant, "stream" if streamed else "whole", CHAT, messages, seed, streamed, meant)

    async def chat(
        self, client: Client, tenant: str, kind: str, path: str, messages: list[dict[str, str]], seed: int, streamed: bool,
        meant: float = 0.0,
    ) -> str | None:  # fmt: skip
        """The answer's text; None where it isn't whole."""
        body = {
            "model": self.plan.model, "messages": messages, "max_tokens": self.plan.output_tokens, "seed": seed,
            "stream": streamed,
        }  # fmt: skip

        async def take(call: Call) -> str:
            if not streamed:
                tree = msgspec.json.decode(await client.whole())
                (choice,) = tree["choices"]
                call.tokens, call.versions = _tokens(choice)
                return str(choice["message"]["content"])
            parts: list[str] = []
            whole, last = False, 0.0
            async for event in client.events():
                if event == b"[DONE]":
                    whole = True
                    continue
                tree = msgspec.json.decode(event)
                if "error" in tree:
                    call.outcome = f"stream.{tree['error'].get('type', 'error')}"
                    continue
                for choice in tree["choices"]:
                    parts.append(choice["delta"].get("content") or "")
                    count, versions = _tokens(choice)
                    last = call.piece(count, versions, last)
            if not whole and call.outcome == OK:
                call.outcome = "stream.cut"
            return "".join(parts)

        call = Call(tenant, kind, meant, 0.0)
        said = await self.call(client, call, "POST", path, msgspec.json.encode(body), take)
        return said if call.outcome == OK else None

    async def call(
        self, client: Client, call: Call, method: str, path: str, body: bytes, take: Callable[[Call], Awaitable[Any]],
        headers: str = "",
    ) -> Any:  # fmt: skip
        """What `take` makes of the answer; None where it's no 2xx, or none came."""
        call.began = time.time()
        call.meant = call.meant or call.began
        found = None
        try:
            async with asyncio.timeout(self.plan.timeout_seconds):
                status, told = await client.send(method, path, body, headers)
                if 200 <= status < 300:
                    found = await take(call)
                else:
                    call.outcome = _refusal(status, await client.whole())
                    client.retry_after = float(told.get("retry-after", 0) or 0)
        except (OSError, EOFError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            call.outcome = f"connection.{type(error).__name__}"
            client.close()
        except TimeoutError:
            call.outcome = "timeout"
            client.close()
        except asyncio.CancelledError:
            client.close()
            raise
        call.ended = time.time()
        self.calls.append(call)
        return found


async def pause(client: Client) -> None:
    """After a refusal: as it asked, within bounds."""
    seconds, client.retry_after = min(client.retry_after, MOST_PAUSE_SECONDS), 0.0
    if seconds:
        await asyncio.sleep(seconds)


def _tokens(choice: dict[str, Any]) -> tuple[int, list[int]]:
    spans = choice.get("weight_version_spans") or []
    return sum(span[1] - span[0] for span in spans), [span[2] for span in spans]


def _refusal(status: int, body: bytes) -> str:
    if status in (429, 503):
        return f"refused.{status}"
    try:
        tree = msgspec.json.decode(body)
        kind = (tree.get("error") or tree).get("type", "")
    except (msgspec.DecodeError, AttributeError):
        kind = ""
    return f"status.{status}.{kind}" if kind else f"status.{status}"


async def closed(plan: Plan, asker: Asker) -> dict[str, Any]:
    idle = Idle(plan, asker)
    await idle.open()
    began = time.time()
    one: Callable[[str, str, int], Awaitable[None]]

    async def lane(tenant: str, token: str, number: int) -> None:
        client = Client(plan.urls[number % len(plan.urls)], token)
        while time.time() < began + plan.seconds:
            await asker.once(client, tenant)
            await pause(client)
        client.close()

    async def grpc_lane(tenant: str, token: str, number: int) -> None:
        from towline.loadtest.grpc_calls import GrpcCaller

        async with GrpcCaller(plan.grpc[number % len(plan.grpc)], token, plan.timeout_seconds) as caller:
            while time.time() < began + plan.seconds:
                seed = asker.next_seed()
                prompt = random.Random(seed).choices(range(16, 30_000), k=plan.prompt_tokens)
                asker.calls.append(await caller.stream(tenant, prompt, plan.output_tokens, seed))

    one = grpc_lane if plan.grpc else lane
    async with asyncio.TaskGroup() as group:
        number = 0
        for tenant, token, count in plan.lanes:
            for _ in range(count):
                group.create_task(one(tenant, token, number))
                number += 1
    return {"began": began, **await idle.close()}


async def opened(plan: Plan, asker: Asker) -> dict[str, Any]:
    (tenant, token, _) = plan.lanes[0]
    free = [Client(url, token) for url in plan.urls]
    made, began = len(free), time.time() + 0.1

    async def one(at: float) -> None:
        nonlocal made
        if free:
            client = free.pop()
        else:
            client, made = Client(plan.urls[made % len(plan.urls)], token), made + 1
        await asker.once(client, tenant, at)
        free.append(client)

    async with asyncio.TaskGroup() as group:
        for offset in intended([(plan.seconds, plan.rate)]):
            if (wait := began + offset - time.time()) > 0:
                await asyncio.sleep(wait)
            group.create_task(one(began + offset))
    return {"began": began, "connections": made}


async def sessions(plan: Plan, asker: Asker) -> dict[str, Any]:
    began = time.time()
    found = {"finished": 0, "unclaimed": 0}

    async def lane(tenant: str, token: str, number: int) -> None:
        client = Client(plan.urls[number % len(plan.urls)], token)
        while time.time() < began + plan.seconds:
            await one(client, tenant)
            await pause(client)
        client.close()

    async def one(client: Client, tenant: str) -> None:
        async def read(call: Call) -> Any:
            data = await client.whole()
            return msgspec.json.decode(data) if data else {}

        kind, path, headers = ("claim", "/tasks/claim", "Prefer: wait=2\r\n") if plan.claims else ("open", "/sessions", "")
        answer = await asker.call(client, Call(tenant, kind, 0.0, 0.0), "POST", path, b"{}", read, headers)
        if not answer:
            found["unclaimed"] += answer is not None
            return
        base, messages = f"/sessions/{answer['id']}", list[dict[str, str]]()
        for _ in range(plan.turns):
            seed = asker.next_seed()
            messages.append({"role": "user", "content": asker.text(seed)})
            streamed = random.Random(f"streamed/{seed}").random() < plan.streamed
            said = await asker.chat(client, tenant, "turn", base + CHAT, messages, seed, streamed)
            if said is None:
                messages.pop()
                break
            messages.append({"role": "assistant", "content": said})
        if messages:
            done = await asker.call(client, Call(tenant, "finish", 0.0, 0.0), "POST", f"{base}/finish", b"{}", read)
            found["finished"] += done is not None
        else:  # not a turn came of it: the task is another's
            await asker.call(client, Call(tenant, "delete", 0.0, 0.0), "DELETE", base, b"", read)

    async with asyncio.TaskGroup() as group:
        number = 0
        for tenant, token, count in plan.lanes:
            for _ in range(count):
                group.create_task(lane(tenant, token, number))
                number += 1
    return {"began": began, "sessions": found}


class Idle:
    """Streams that are open and say nothing. `open` returns when each has had its first tokens."""

    def __init__(self, plan: Plan, asker: Asker) -> None:
        self._plan, self._asker = plan, asker
        self._tasks: list[asyncio.Task[None]] = []
        self._alive = self._refused = 0
        self._since = 0.0

    async def open(self) -> None:
        plan, gate = self._plan, asyncio.Semaphore(OPENED_TOGETHER)
        if not plan.idle:
            return
        waits = [asyncio.Event() for _ in range(plan.idle)]
        self._tasks = [asyncio.create_task(self._one(number, gate, event)) for number, event in enumerate(waits)]
        await asyncio.gather(*[event.wait() for event in waits])
        self._since = time.time()
        await asyncio.sleep(plan.seconds / 2)  # so that what they cost by themselves can be told

    async def close(self) -> dict[str, Any]:
        if not self._tasks:
            return {}
        alive = self._alive
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return {"idle": {"asked": len(self._tasks), "alive": alive, "refused": self._refused, "since": self._since}}

    async def _one(self, number: int, gate: asyncio.Semaphore, begun: asyncio.Event) -> None:
        plan = self._plan
        client = Client(plan.urls[number % len(plan.urls)], plan.lanes[0][1])
        body = {
            "model": plan.model, "messages": [{"role": "user", "content": self._asker.text(number)}], "stream": True,
            "seed": IDLE_SEED + number, "max_tokens": 1024,
        }  # fmt: skip
        counted = False
        try:
            async with gate:
                status, _ = await client.send("POST", CHAT, msgspec.json.encode(body))
                if status != 200:
                    self._refused += 1
                    return
                events = client.events()
                await anext(events)
            self._alive += 1
            counted = True
            begun.set()
            async for _ in events:
                pass
        except (OSError, EOFError, StopAsyncIteration):
            pass
        finally:
            self._alive -= counted
            begun.set()
            client.close()


MODES = {"closed": closed, "open": opened, "sessions": sessions}


async def main(plan: Plan) -> dict[str, Any]:
    asker = Asker(plan)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)  # the other processes are ready too
    before = time.process_time()
    found = await MODES[plan.mode](plan, asker)
    spent = time.process_time() - before
    return found | {"ended": time.time(), "cpu_seconds": spent, "calls": [astuple(call) for call in asker.calls]}


if __name__ == "__main__":
    given = json.loads(sys.stdin.readline())
    answer = memoryview(json.dumps(uvloop.run(main(Plan(**given)))).encode() + b"\n")
    while answer:  # not by print, which under PYTHONUNBUFFERED loses what a pipe doesn't take at once
        answer = answer[os.write(1, answer) :]
    os._exit(0)
