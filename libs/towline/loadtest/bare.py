"""python -m towline.loadtest.bare: a synthetic engine behind nothing but HTTP, which the gateway is measured against.

The same server, route and events, pieces of as many tokens; no bus, no door, no versions, no tokenizer, no tenants.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from towline.contract.task import SamplingParams
from towline.engine.base import GenerateRequest, Progress
from towline.engine.synthetic import SyntheticEngine
from towline.loadtest.gateway_model import words


class Bare:
    """One engine's chat route."""

    def __init__(self, engine: SyntheticEngine, chunk_tokens: int) -> None:
        self._engine, self._chunk_tokens, self._words = engine, chunk_tokens, words()

    async def chat(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        prompt = [1] * sum(message["content"].count(" ") for message in body["messages"])
        moved: asyncio.Queue[Progress | None] = asyncio.Queue()
        asked = GenerateRequest(
            request_id=secrets.token_hex(8), tokens=prompt, seed=body["seed"],
            sampling=SamplingParams(max_tokens=body["max_tokens"], stop_token_ids=(0,)),
            on_progress=moved.put_nowait if body["stream"] else None, progress_every=self._chunk_tokens,
        )  # fmt: skip
        head = {"id": asked.request_id, "created": int(time.time()), "model": body["model"]}
        if not body["stream"]:
            done = await self._engine.generate(asked)
            said = {"message": {"role": "assistant", "content": self._text(done.tokens)}}
            return JSONResponse({**head, "object": "chat.completion", "choices": [self._choice(said, 0, len(done.tokens), True)]})
        return StreamingResponse(self._events(asked, moved, head), media_type="text/event-stream")

    async def _events(
        self, asked: GenerateRequest, moved: asyncio.Queue[Progress | None], head: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        generating = asyncio.create_task(self._engine.generate(asked))
        generating.add_done_callback(lambda _: moved.put_nowait(None))
        sent, head = 0, {**head, "object": "chat.completion.chunk"}
        try:
            while True:
                progress = await moved.get()
                tokens = generating.result().tokens if progress is None else progress.tokens
                delta = {"delta": {"content": self._text(tokens[sent:])}}
                choice = self._choice(delta, sent, len(tokens), progress is None)
                sent = len(tokens)
                yield b"data: " + msgspec.json.encode({**head, "choices": [choice]}) + b"\n\n"
                if progress is None:
                    yield b"data: [DONE]\n\n"
                    return
        finally:
            generating.cancel()

    def _text(self, tokens: list[int]) -> str:
        return "".join(self._words[token] for token in tokens if token > 1)

    @staticmethod
    def _choice(said: dict[str, Any], start: int, end: int, over: bool) -> dict[str, Any]:
        return {"index": 0, **said, "finish_reason": "stop" if over else None, "weight_version_spans": [[start, end, 0, "start"]]}


async def main(plan: dict[str, Any]) -> None:
    engine = SyntheticEngine(**plan["engine"])
    await engine.start(Path(), 0)
    bare = Bare(engine, plan["chunk_tokens"])
    app = Starlette(routes=[Route("/v1/chat/completions", bare.chat, methods=["POST"])])
    config = uvicorn.Config(
        app, host="127.0.0.1", port=plan["port"], log_config=None, access_log=False, lifespan="off", ws="none",
        backlog=2048,
    )  # fmt: skip
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.stdin.readline())))
