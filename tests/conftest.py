"""Fixtures of every suite. The servers are real ones, started once a session when a test first asks for them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers import running
from towline.config import BusSettings, StoreSettings
from towline.local.servers import NatsServer, S3Server

ROOM_BYTES = 1 << 40
"""What all tests' runs may reserve together; it takes no disk."""


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A nats-server that all tests of the session share. Whoever kills or fills one starts their own (support.servers)."""
    yield from running(NatsServer(tmp_path_factory.mktemp("nats"), max_store_bytes=ROOM_BYTES))


@pytest.fixture(scope="session")
def nats_url(nats_server: NatsServer) -> str:
    return nats_server.url


@pytest.fixture(scope="session")
def bus_settings(nats_server: NatsServer) -> BusSettings:
    """The session's nats-server, with a small budget so that many runs find room."""
    return nats_server.settings(BusSettings(budget_bytes=256 << 20))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server that all tests of the session share."""
    yield from running(S3Server(tmp_path_factory.mktemp("s3")))


@pytest.fixture(scope="session")
def s3_settings(s3_server: S3Server) -> StoreSettings:
    """A bucket of the session's S3 server. Tests keep apart by `run_name`, which every key begins with."""
    return s3_server.settings()


@pytest.fixture
def file_store_settings(tmp_path: Path) -> StoreSettings:
    """A store in a folder of the test's own."""
    return StoreSettings(url=(tmp_path / "store").as_uri())


@pytest.fixture
def run_name() -> str:
    """A run name that no other test has."""
    return f"t-{secrets.token_hex(5)}"
