"""kill -9 of a replica and of the gateway in the middle of a gRPC stream: real processes, and each token is shown once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from live.gateway.conftest import Scene
from live.gateway.test_kills import Processes
from support.waiting import until
from towline.bus.topology import STATUS
from towline.client.grpc import AsyncGrpcGateway
from towline.client.rules import Piece
from towline.config import BusSettings
from towline.errors import UnavailableError
from towline.local.daemon import free_ports

COUNT = 200


def with_grpc(scene: Scene) -> int:
    """The port that the run's gateways have from now on."""
    (port,) = free_ports(1)
    config = scene.world.folder / "run.toml"
    config.write_text(config.read_text().replace("[gateway]", f"[gateway]\ngrpc_port = {port}"))
    return port


@pytest.mark.slow
async def test_a_gateway_that_is_stopped_ends_watches_lets_calls_end_and_exits_well(
    scene: Scene, bus_settings: BusSettings
) -> None:
    scene.seed(text=False)
    processes = Processes(scene, bus_settings, "synthetic")
    port = with_grpc(scene)
    try:
        await processes.start("rollout_worker", "a")
        await scene.world.served(0, "a", seconds=60.0)
        await processes.start("gateway", "g")
        await processes.url("g")
        async with AsyncGrpcGateway(f"127.0.0.1:{port}") as gateway:
            sampling = {"max_new_tokens": 120, "sampling_seed": 8, "ignore_eos": True}  # three seconds
            running = asyncio.create_task(gateway.generate([5, 6, 7], sampling=sampling))
            watched = gateway.watch_versions()
            assert (await anext(watched)).serving == {0: 1}
            await processes.running_on()
            process = processes.all["g"]
            process.terminate()
            with pytest.raises(UnavailableError, match="drains"):
                async for _ in watched:
                    pass
            assert len((await running)[0].tokens) == 120
            assert await process.wait() == 0
            log = (scene.world.folder / "g.log").read_text()
            assert "Traceback" not in log
            assert "rror" not in log, log
            processes.all.pop("g")
    finally:
        for name in list(processes.all):
            await processes.kill(name)


@pytest.mark.slow
async def test_a_stream_goes_on_over_a_killed_replica_and_a_killed_gateway(scene: Scene, bus_settings: BusSettings) -> None:
    scene.seed(text=False)
    processes = Processes(scene, bus_settings, "synthetic")
    port = with_grpc(scene)
    pieces: list[Piece] = []

    async def follow(stream: AsyncIterator[Piece]) -> None:
        async for piece in stream:
            pieces.append(piece)

    try:
        for name in ("a", "b"):
            await processes.start("rollout_worker", name)
            await scene.world.served(0, name, seconds=60.0)
        await processes.start("gateway", "g")
        await processes.url("g")
        status = msgspec.json.decode(await scene.world.bus.kv(STATUS).get("gateway.g") or b"{}")
        assert status["figures"]["grpc_port"] == port
        async with AsyncGrpcGateway(f"127.0.0.1:{port}") as gateway:
            sampling = {"max_new_tokens": COUNT, "sampling_seed": 8, "ignore_eos": True}
            reading = asyncio.create_task(follow(gateway.stream([5, 6, 7], sampling=sampling, wait_seconds=30)))
            await processes.kill(await processes.running_on())
            await processes.running_on()
            await until(lambda: len(pieces) > 0)
            await processes.kill("g")
            seen = sum(len(piece.tokens) for piece in pieces)
            assert 0 < seen < COUNT, "it was killed in the middle"
            await processes.start("gateway", "g2")
            await reading
            tokens = [token for piece in pieces for token in piece.tokens]
            assert next(span.start for piece in pieces for span in piece.spans) == 0
            assert pieces[-1].finish == "length"
            (undisturbed,) = await gateway.generate([5, 6, 7], sampling=sampling)
            assert tokens == undisturbed.tokens
    finally:
        for name in list(processes.all):
            with contextlib.suppress(ProcessLookupError):
                await processes.kill(name)
