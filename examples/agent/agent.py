"""An agent as anybody writes one: OpenAI's client, a tool, a loop. What makes it train the policy is two requests: the claim of a
task before the conversation, `finish` behind it. `python agent.py GATEWAY_URL` goes on until the gateway is gone.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx
import openai

from towline.environment.calculator import calculate
from towline.environment.tool_use import ToolRefused

CONVERSATIONS = 32
"""At a time."""
MOST_CALLS = 2
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "the value of an expression",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
        },
    }
]
WAIT = {"Prefer": "wait=10"}


class Agent:
    """Claims and answers, over and over. `counts` says what became of its sessions."""

    def __init__(self, url: str, *, conversations: int = CONVERSATIONS) -> None:
        self.counts: Counter[str] = Counter()
        self._conversations, self._gone = conversations, asyncio.Event()
        self._http = httpx.AsyncClient(base_url=url, timeout=60.0)
        self._openai = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=5, timeout=60.0, default_headers=WAIT)

    async def run(self) -> None:
        """Until the gateway goes away, as it does at the run's end."""
        async with self._http, self._openai:
            await asyncio.gather(*(self._over_and_over() for _ in range(self._conversations)))

    async def _over_and_over(self) -> None:
        while not self._gone.is_set():
            try:
                await self._one()
            except (httpx.TransportError, openai.APIConnectionError):
                self._gone.set()
            except openai.APIStatusError as error:
                # 409: the buffer took the task back, or it has become too old; whatever it is, the sample isn't lost.
                self.counts[f"refused ({error.status_code})"] += 1

    async def _one(self) -> None:
        claim = await self._http.post("/tasks/claim", json={"environment": "calculator", "tools": TOOLS}, headers=WAIT)
        if claim.status_code != 201:
            self.counts[f"no task ({claim.status_code})"] += 1
            await asyncio.sleep(float(claim.headers.get("retry-after", 1)))
            return
        task = claim.json()
        await self._converse(task)
        finished = await self._http.post(f"/sessions/{task['id']}/finish")
        self.counts["finished" if finished.status_code == 200 else f"not finished ({finished.status_code})"] += 1

    async def _converse(self, task: Mapping[str, Any]) -> None:
        session = self._openai.with_options(base_url=str(self._http.base_url).rstrip("/") + task["base_url"])
        messages: list[Any] = [{"role": "user", "content": task["reference"]["question"]}]
        for _ in range(MOST_CALLS + 1):
            answer = await session.chat.completions.create(model=task["model"], messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            self.counts["turns"] += 1
            if not message.tool_calls:
                return
            self.counts["calls"] += 1
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": calculated(call.function.arguments)}
                for call in message.tool_calls
                if call.type == "function"
            ]


def calculated(arguments: str) -> str:
    """The tool. What it can't do it says."""
    try:
        return calculate(str(json.loads(arguments)["expression"]))
    except (ToolRefused, ValueError, KeyError, TypeError):
        return "0"


if __name__ == "__main__":
    agent = Agent(sys.argv[1])
    asyncio.run(agent.run())
    print(dict(agent.counts))
