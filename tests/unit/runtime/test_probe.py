"""The health check that a container asks its service with, and tokens that lie in files."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from towline.config import ServiceSettings, TenantSettings
from towline.errors import UsageError
from towline.runtime.health import Health, HealthServer
from towline.runtime.metrics import Metrics
from towline.runtime.probe import probe


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("a-token-in-a-file\n")
    return path


async def test_a_probe_tells_ready_from_not_ready_and_from_gone(token_file: Path) -> None:
    health = Health()
    server = HealthServer(ServiceSettings(token_file=str(token_file)), health, Metrics("probe"))
    await server.start()
    environment = {"TOWLINE_SERVICE__PORT": str(server.port), "TOWLINE_SERVICE__TOKEN_FILE": str(token_file)}

    async def asked(path: str = "/readyz", **changed: str) -> str:
        return await asyncio.to_thread(probe, path, environment | changed)

    health.not_ready("no version yet")
    assert "no version yet" in await asked()
    assert await asked("/healthz") == ""
    health.stand_by("standby: pen is held by probe.a")
    assert "standby" in await asked()
    assert await asked("/readyz?standbyok=true") == ""
    health.ready()
    assert await asked() == ""
    assert await asked(TOWLINE_SERVICE__TOKEN_FILE="", TOWLINE_SERVICE__TOKEN="a-token-in-a-file") == ""
    assert "401" in await asked(TOWLINE_SERVICE__TOKEN_FILE="")
    await server.close()
    assert "refused" in await asked()


async def test_a_probe_without_a_port_is_a_fault() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "towline.runtime.probe", env={}, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert (process.returncode, out) == (1, b"TOWLINE_SERVICE__PORT isn't set: give the service a port of its own\n")


def test_a_tenants_token_stands_in_one_place_and_is_long(tmp_path: Path, token_file: Path) -> None:
    assert TenantSettings(token_file=str(token_file)).secret == "a-token-in-a-file"
    for given in ({}, {"token": "t" * 16, "token_file": str(token_file)}, {"token": "short"}):
        with pytest.raises(ValidationError, match="token"):
            TenantSettings.model_validate(given)
    token_file.write_text("short")
    with pytest.raises(UsageError, match="at least 16"):
        _ = TenantSettings(token_file=str(token_file)).secret
