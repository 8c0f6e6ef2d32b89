"""Sends REQUESTS requests to the gateway, PARALLEL at a time, and prints what they took, one line of JSON. Bounded: it ends by
itself, with exit status 1 where a request failed for good."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from towline.client.gateway import AsyncGateway
from towline.errors import TowlineError

TOKEN = Path("/access/tenant.token")


async def load(url: str, token: str, requests: int, parallel: int, prompt: str, max_tokens: int) -> int:
    """The exit status."""
    seconds: list[float] = []
    tokens = 0
    failed: list[str] = []
    left = iter(range(requests))
    started = time.monotonic()

    async def send(gateway: AsyncGateway) -> None:
        nonlocal tokens
        for _ in left:
            begun = time.monotonic()
            try:
                found = await gateway.generate(prompt, sampling={"max_new_tokens": max_tokens})
            except TowlineError as error:
                failed.append(f"{error.code}: {error.message}")
                continue
            seconds.append(time.monotonic() - begun)
            tokens += sum(len(one.tokens) for one in found)

    async with AsyncGateway(url, token=token) as gateway:
        async with asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(send(gateway))
    wall, seconds = time.monotonic() - started, sorted(seconds)
    told = {
        "requests": len(seconds),
        "failed": len(failed),
        "first_failure": failed[0] if failed else None,
        "requests_per_second": round(len(seconds) / wall, 2),
        "tokens_per_second": round(tokens / wall, 1),
        "p50_seconds": round(seconds[len(seconds) // 2], 4) if seconds else None,
        "p99_seconds": round(seconds[len(seconds) * 99 // 100], 4) if seconds else None,
    }
    print(json.dumps(told), flush=True)
    return 1 if failed else 0


def main() -> int:
    given = os.environ
    numbers = int(given["REQUESTS"]), int(given["PARALLEL"])
    token = TOKEN.read_text().strip()
    return asyncio.run(load(given["GATEWAY"], token, *numbers, given["PROMPT"], int(given["MAX_TOKENS"])))


if __name__ == "__main__":
    sys.exit(main())
