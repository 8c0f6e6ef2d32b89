"""kill -9 of a replica and of the gateway in the middle of a stream, under an Idempotency-Key: real processes, and the client's
retry gets the same tokens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import Any

import httpx
import msgspec
import pytest

from live.gateway.conftest import Scene, events
from support.waiting import until
from towline.bus.topology import STATUS
from towline.config import BusSettings

TOML = """
[run]
name = "{run}"
directory = "{folder}"
[bus]
url = "{url}"
budget_bytes = {budget}
[store]
url = "{store}"
[model]
source = "tiny"
[prompts]
source = "a:b"
[sampling]
max_tokens = 8
stop_token_ids = []
[rollout]
engine = "{engine}"
slots = 4
poll_seconds = 0.1
max_context_tokens = 1024
[rollout.arguments]
{arguments}
[reward]
function = "a:b"
[gateway]
doors = true
chunk_tokens = 4
chunk_seconds = 2.0
"""
ARGUMENTS = {
    "synthetic": "vocabulary = 61\nmean_tokens = 100000.0\nsigma = 0.0\ntokens_per_second = 40.0",
    "torch": "",
}


class Processes:
    """Services of one run, each a process of its own."""

    def __init__(self, scene: Scene, bus_settings: BusSettings, engine: str) -> None:
        self._scene, self.all = scene, dict[str, asyncio.subprocess.Process]()
        self._config = scene.world.folder / "run.toml"
        self._config.write_text(
            TOML.format(
                run=scene.world.run, folder=scene.world.folder / "runs", url=bus_settings.url, budget=bus_settings.budget_bytes,
                store=(scene.world.folder / "store").as_uri(), engine=engine, arguments=ARGUMENTS[engine],
            )
        )  # fmt: skip

    async def start(self, service: str, replica: str) -> None:
        self.all[replica] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", f"towline.{service}", "--config", str(self._config), "--replica", replica,
            stdout=(self._scene.world.folder / f"{replica}.log").open("wb"), stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    async def url(self, replica: str) -> str:
        """Of a gateway that is ready."""
        found: list[str] = []

        async def ready() -> bool:
            value = await self._scene.world.bus.kv(STATUS).get(f"gateway.{replica}")
            status: dict[str, Any] = msgspec.json.decode(value) if value else {"ready": False}
            if status["ready"] and status["pid"] == self.all[replica].pid:
                found.append(status["figures"]["api_url"])
            return bool(found)

        await until(ready, 60.0)
        return found[0]

    async def kill(self, replica: str) -> None:
        process = self.all.pop(replica)
        process.kill()
        await process.wait()

    async def running_on(self) -> str:
        """The worker that has the request."""
        found: list[str] = []

        async def busy() -> bool:
            for name in self.all:
                value = await self._scene.world.bus.kv(STATUS).get(f"rollout_worker.{name}")
                if value and msgspec.json.decode(value)["figures"].get("requests", {}).get("running"):
                    found.append(name)
            return bool(found)

        await until(busy)
        return found[0]


async def stream(url: str, given: dict[str, Any], key: str, *, stop_after: int | None = None) -> tuple[list[int], dict[str, Any]]:
    """Tokens and the last event's meta; what came of it where the stream breaks, or from `stop_after` tokens on."""
    tokens: list[int] = []
    meta: dict[str, Any] = {}
    headers = {"Idempotency-Key": key, "Prefer": "wait=30"}
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        with contextlib.suppress(httpx.TransportError):
            async with client.stream("POST", "/generate", json=given, headers=headers) as response:
                assert response.status_code == 200, await response.aread()
                async for event in events(response):
                    if event == "DONE":
                        return tokens, meta
                    assert "error" not in event, event
                    tokens += event["output_ids"]
                    meta = event["meta_info"]
                    if stop_after is not None and len(tokens) >= stop_after:
                        return tokens, meta
    return tokens, meta


@pytest.mark.parametrize("engine", ["synthetic", pytest.param("torch", marks=pytest.mark.slow)])
async def test_a_replica_and_the_gateway_killed_mid_stream_and_the_retry_gets_the_same_tokens(
    scene: Scene, bus_settings: BusSettings, engine: str
) -> None:
    scene.seed(text=False)
    processes = Processes(scene, bus_settings, engine)
    count = 200 if engine == "synthetic" else 900
    given = {
        "input_ids": [5, 6, 7], "stream": True, "incremental_streaming_output": True,
        "sampling_params": {"max_new_tokens": count, "temperature": 1.0},
    }  # fmt: skip
    try:
        for name in ("a", "b"):
            await processes.start("rollout_worker", name)
            await scene.world.served(0, name, seconds=60.0)
        await processes.start("gateway", "g")
        url = await processes.url("g")

        first = asyncio.create_task(stream(url, given, "key-1"))
        worker = await processes.running_on()
        await processes.kill(worker)
        continuing = await processes.running_on()
        assert continuing != worker
        await processes.kill("g")
        seen, _ = await first
        assert 0 < len(seen) < count, "it was killed in the middle"

        await processes.start("gateway", "g2")
        url = await processes.url("g2")
        tokens, meta = await stream(url, given, "key-1")
        assert len(tokens) == count
        assert tokens[: len(seen)] == seen
        assert meta["weight_version_start"] == meta["weight_version_end"] == 0
        again, told = await stream(url, given, "key-1")
        assert (again, told["id"], told["seed"]) == (tokens, meta["id"], meta["seed"])

        # An undisturbed request with the seed that was drawn: what the kills led to is what it would have been.
        plain = given | {"sampling_params": given["sampling_params"] | {"sampling_seed": meta["seed"]}}  # type: ignore[operator]
        assert (await stream(url, plain, "key-2"))[0] == tokens

        async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
            other = await client.post("/generate", json=plain, headers={"Idempotency-Key": "key-1"})
            assert (other.status_code, other.json()["error"]["type"]) == (422, "IdempotencyKeyReused")
    finally:
        for name in list(processes.all):
            await processes.kill(name)
