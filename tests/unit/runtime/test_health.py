"""Probes get the service's word, and nobody else's business is served without the token."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import httpx
import pytest

from towline.config import ServiceSettings
from towline.errors import UsageError
from towline.runtime.health import Health, HealthServer
from towline.runtime.metrics import Metrics


def _settings(**values: object) -> ServiceSettings:
    return ServiceSettings.model_validate(values)


@pytest.fixture
async def server() -> AsyncIterator[tuple[HealthServer, Health, Metrics]]:
    health, metrics = Health(), Metrics("probe")
    server = HealthServer(_settings(token="right-token"), health, metrics)
    await server.start()
    yield server, health, metrics
    await server.close()


async def test_every_route_needs_the_token_where_there_is_one(server: tuple[HealthServer, Health, Metrics]) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server[0].port}") as client:
        for path in ("/healthz", "/readyz", "/metrics"):
            for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right-token"}):
                answer = await client.get(path, headers=given)
                assert answer.status_code == 401
                assert "right-token" not in answer.text
            assert (await client.get(path, headers={"Authorization": "Bearer right-token"})).status_code in (200, 503)
        assert (await client.post("/healthz")).status_code == 405
        assert (await client.get("/other")).status_code == 404


async def test_readiness_follows_the_services_word(server: tuple[HealthServer, Health, Metrics]) -> None:
    _, health, metrics = server
    steps = metrics.counter("steps", "Steps done", ["lane"])
    steps.labels("train").inc(3)
    auth = {"Authorization": "Bearer right-token"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server[0].port}", headers=auth) as client:
        starting = await client.get("/readyz")
        assert (starting.status_code, starting.json()) == (503, {"ready": False, "reason": "starting"})
        health.ready("bus_full")
        assert (await client.get("/readyz")).json() == {"ready": True, "reason": "bus_full"}
        health.stand_by("standby: pen is held by probe.a")
        assert (await client.get("/readyz")).status_code == 503
        for path, code in (("/readyz?standbyok=true", 200), ("/readyz?standbyok=false", 503), ("/readyz?standbyok", 503)):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()) == (code, {"ready": False, "reason": "standby: pen is held by probe.a"})
        health.not_ready("no_checkpoint")
        assert (await client.get("/readyz?standbyok=true")).status_code == 503
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/healthz")).status_code == 200
        health.alive = False
        assert (await client.get("/healthz")).status_code == 503
        assert 'towline_probe_steps_total{lane="train"} 3.0' in (await client.get("/metrics")).text


async def test_answers_arent_held_back_by_nagles_algorithm(server: tuple[HealthServer, Health, Metrics]) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server[0].port}") as client:
        await client.get("/healthz")  # keeps its connection
        (accepted,) = server[0]._server.server_state.connections
        assert accepted.transport is not None
        connection = accepted.transport.get_extra_info("socket")
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_beyond_loopback_a_token_is_demanded() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(UsageError, match=r"needs service\.token"):
            HealthServer(_settings(host=host), Health(), Metrics("probe"))


async def test_a_taken_port_is_a_usage_error() -> None:
    first = HealthServer(_settings(), Health(), Metrics("a"))
    await first.start()
    with pytest.raises(UsageError, match=r"service\.port"):
        HealthServer(_settings(port=first.port), Health(), Metrics("b"))
    await first.close()
