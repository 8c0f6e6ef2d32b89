"""The door by itself: what it does about gateways that vanish, versions that fail their proof, and calls that make no sense."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from live.gateway.conftest import Scene, spell
from support.waiting import until
from towline.bus.client import Bus
from towline.bus.topology import CONTROL
from towline.config import BusSettings
from towline.contract.codec import encode
from towline.contract.serve import ServeChunk, ServeRequest
from towline.contract.task import SamplingParams, VersionSpan, pack_tokens
from towline.gateway.calls import Calls, Gone, Refused
from towline.gateway.samples import Sample

SLOW = {"tokens_per_second": 100.0}


def ask(name: str, count: int = 20, **fields: Any) -> ServeRequest:
    return ServeRequest(
        id=name, tokens=pack_tokens(spell("abc")), sampling=SamplingParams(max_tokens=count), seed=5, chunk_tokens=4, **fields
    )


@pytest.fixture
async def calls(scene: Scene, bus_settings: BusSettings) -> AsyncIterator[Calls]:
    bus = await Bus.connect(bus_settings, run=scene.world.run, client_name="caller")
    found = Calls(bus, 3.0)
    await found.start()
    yield found
    await bus.close()


async def test_chunks_are_numbered_and_add_up_and_a_call_goes_on_from_a_prefix(scene: Scene, calls: Calls) -> None:
    scene.seed()
    await scene.worker(engine="synthetic", arguments=SLOW)
    chunks = [chunk async for chunk in calls.call("w", ask("one"))]
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    assert len(chunks) > 3
    assert (chunks[0].tokens, chunks[-1].finish, chunks[-1].applied) == (None, "length", 0)
    whole = Sample()
    for chunk in chunks[1:]:
        whole.add(*chunk.content(), chunk.spans, 0)
    assert whole.spans == [VersionSpan(0, 20, 0, "start")]
    later = Sample()
    prefix = pack_tokens(spell("abc") + whole.tokens[:7])
    rest = ServeRequest(id="two", tokens=prefix, sampling=SamplingParams(max_tokens=20), seed=5, position0=7)
    async for chunk in calls.call("w", rest):
        later.add(*chunk.content(), chunk.spans, 0)
    assert later.tokens == whole.tokens[7:]


async def test_what_makes_no_sense_is_refused_and_who_isn_t_there_is_gone(scene: Scene, calls: Calls) -> None:
    scene.seed()
    await scene.worker(engine="synthetic", arguments=SLOW, slots=2, gateway={"waiting": 1})

    async def refused(request: ServeRequest) -> tuple[str, str]:
        with pytest.raises(Refused) as found:
            async for _ in calls.call("w", request):
                pass
        return found.value.code, found.value.message

    assert (await refused(ask("both", min_version=0, exact_version=0)))[0] == "invalid"
    assert "context" in (await refused(ask("long", 600)))[1]
    assert (await refused(ask("later", exact_version=7)))[0] == "not_ready"
    with pytest.raises(Gone, match="nobody listens"):
        async for _ in calls.call("nobody", ask("x")):
            pass
    running = [asyncio.create_task(_drain(calls, ask(f"r{index}", 200))) for index in range(3)]
    await until(lambda: scene.workers["w"].worker.report()["requests"]["waiting"] == 1)
    assert (await refused(ask("more")))[0] == "busy"
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await until(lambda: scene.workers["w"].worker.busy == 0)
    await scene.world.bus.connection.send(scene.world.bus.topology.serve("w"), b"\xffrubbish")
    await scene.world.bus.connection.send(scene.world.bus.topology.serve("w") + ".cancel", b"\xffrubbish")
    assert [chunk async for chunk in calls.call("w", ask("after", 2))][-1].finish == "length"


async def _drain(calls: Calls, request: ServeRequest) -> None:
    async for _ in calls.call("w", request):
        pass


async def test_a_gateway_that_vanished_frees_its_slots(scene: Scene, bus_settings: BusSettings) -> None:
    scene.seed()
    await scene.worker(engine="synthetic", arguments={"tokens_per_second": 5.0}, gateway={"chunk_seconds": 0.6})
    bus = await Bus.connect(bus_settings, run=scene.world.run, client_name="vanishing")
    calls = Calls(bus, 3.0)
    await calls.start()
    running = asyncio.create_task(_drain(calls, ask("long", 400)))
    worker = scene.workers["w"].worker
    await until(lambda: worker.busy == 1)
    await bus.connection.close()  # as a kill would: no cancel is sent
    await until(lambda: worker.busy == 0, 10.0)
    assert worker.report()["requests"]["served"] == 0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_replica_that_is_alive_but_has_nothing_to_say_isn_t_gone(scene: Scene, bus_settings: BusSettings) -> None:
    scene.seed()
    await scene.worker(engine="synthetic", arguments={"tokens_per_second": 2.0}, gateway={"chunk_seconds": 0.6})
    bus = await Bus.connect(bus_settings, run=scene.world.run, client_name="patient")
    calls = Calls(bus, 1.0)
    await calls.start()
    chunks = [chunk async for chunk in calls.call("w", ask("slow", 4))]
    assert chunks[-1].finish == "length"
    await bus.close()


async def test_a_missing_chunk_is_noticed(scene: Scene, calls: Calls) -> None:
    bus = scene.world.bus

    async def say(reply: str) -> None:
        for number in (0, 1, 3):
            await bus.connection.send(reply, encode(ServeChunk(id="x", number=number)))

    saying: list[asyncio.Task[None]] = []
    await bus.connection.subscribe(
        bus.topology.serve("fake"), lambda message: saying.append(asyncio.create_task(say(message.reply)))
    )
    await bus.stream_state(CONTROL)  # an answer on the same connection: the server has the subscription
    with pytest.raises(Gone, match="chunk 3 came where 2 was due"):
        async for _ in calls.call("fake", ask("x")):
            pass


async def test_nothing_of_a_version_that_fails_its_proof_leaves_the_door(scene: Scene) -> None:
    scene.seed()
    running = await scene.worker()
    client = await scene.gateway()
    given = {"input_ids": spell("abc"), "sampling_params": {"max_new_tokens": 500, "sampling_seed": 5, "ignore_eos": True}}
    whole = (await client.post("/generate", json=given)).raise_for_status().json()["output_ids"]
    commit = await asyncio.to_thread(scene.world.stage, 1, probe_shift=1.0)
    asked: list[asyncio.Task[httpx.Response]] = []
    version = commit()
    while not running.worker.replica.figures.failed:  # so that some are underway whenever the version comes and goes
        asked.append(asyncio.create_task(client.post("/generate", json=given)))
        await asyncio.sleep(0.1)
    assert version in running.worker.replica.figures.failed
    for task in asked:
        answer = (await task).raise_for_status().json()
        assert answer["output_ids"] == whole
        assert answer["meta_info"]["spans"] == [[0, len(whole), 0, "start"]]


async def test_the_api_over_tls(scene: Scene, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    made += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    try:
        await asyncio.to_thread(subprocess.run, made, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    scene.seed()
    await scene.worker(engine="synthetic")
    client = await scene.gateway(tls_certificate=str(certificate), tls_key=str(key))
    assert client.base_url.scheme == "https"
    assert (await client.get("/v1/models")).status_code == 200
    async with httpx.AsyncClient() as stranger:
        with pytest.raises(httpx.TransportError):
            await stranger.get(str(client.base_url) + "/health")
