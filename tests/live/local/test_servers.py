"""The embedded servers: found again, restarted in place, and never left behind."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import urllib3
from minio import Minio

from support.servers import running
from towline.config import StoreSettings
from towline.errors import MissingError, UnavailableError
from towline.local.daemon import GRPC_OFFSET
from towline.local.servers import NatsServer, S3Server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    yield from running(S3Server(tmp_path_factory.mktemp("own-s3"), bucket="weights"))


def _client(settings: StoreSettings) -> Minio:
    return Minio(
        settings.endpoint.removeprefix("http://"), settings.access_key, settings.secret_key.get_secret_value(),
        secure=False, region=settings.region, http_client=urllib3.PoolManager(timeout=30.0, retries=False),
    )  # fmt: skip


def test_s3_objects_survive_sigkill_and_the_ports_stay(s3: S3Server) -> None:
    client = _client(s3.settings())
    client.put_object("weights", "a/b", io.BytesIO(b"bytes"), 5)
    ports, endpoint, pid = s3.state["ports"], s3.endpoint, s3.pid
    s3.kill()
    assert s3.pid is None
    s3.start()
    assert (s3.state["ports"], s3.endpoint) == (ports, endpoint)
    assert s3.pid != pid
    with client.get_object("weights", "a/b") as answer:
        assert answer.read() == b"bytes"
    client.put_object("weights", "a/c", io.BytesIO(b"more"), 4)


def test_s3_moves_to_other_ports_with_its_data_when_its_own_are_taken(s3: S3Server) -> None:
    _client(s3.settings()).put_object("weights", "kept", io.BytesIO(b"kept"), 4)
    s3.stop()
    taken = s3.state["ports"]["master"]
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", taken))
        other.listen()
        s3.start()
        ports = s3.state["ports"].values()
        assert taken not in ports
        assert max(ports) + GRPC_OFFSET < 32_768
        client = _client(s3.settings(prefix="some/where"))
        with client.get_object("weights", "kept") as answer:
            assert answer.read() == b"kept"
        client.put_object("weights", "new", io.BytesIO(b"new"), 3)


def test_a_killed_s3_server_that_is_stopped_leaves_no_sockets(tmp_path: Path) -> None:
    server = S3Server(tmp_path / "s3")
    server.start()
    ports = [port + GRPC_OFFSET for port in server.state["ports"].values()]

    def sockets() -> list[Path]:
        return [path for port in ports for path in Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock")]

    try:
        assert len(sockets()) >= 4
        server.kill()
        assert sockets()
    finally:
        server.stop()
    assert not sockets()


def test_the_s3_key_is_readable_by_its_owner_alone(s3: S3Server) -> None:
    assert (s3.folder / "s3-server.json").stat().st_mode & 0o077 == 0


def test_a_second_process_finds_the_server_and_can_stop_it(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    try:
        server.start()
        pid = server.pid
        code = (
            "import sys; from pathlib import Path; from towline.local.servers import NatsServer\n"
            "server = NatsServer(Path(sys.argv[1])); server.start(); print(server.pid, server.url); server.stop()\n"
        )
        answer = subprocess.run(
            [sys.executable, "-c", code, str(server.folder)], capture_output=True, text=True, timeout=30, check=True
        )
        assert answer.stdout.split() == [str(pid), server.url]
        assert server.pid is None
        assert pid is not None
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    finally:
        server.stop()


def test_a_reused_process_id_is_never_taken_for_the_server(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    with pytest.raises(MissingError, match="was ever started"):
        _ = server.state
    server.start()
    server.stop()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        state = server.state
        state["pid"] = other.pid
        state["created"] -= 60.0
        server._write(state)
        assert server.pid is None
        server.stop()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_server_that_cannot_start_says_where_its_log_is(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats", authorization="not a configuration {")
    with pytest.raises(UnavailableError, match=r"nats-server ended at its start; see .*nats-server\.log"):
        server.start()
    assert server.log_tail()
    assert server.pid is None


def test_a_killed_test_session_leaves_no_server(tmp_path: Path) -> None:
    session = (
        "import sys, time; from pathlib import Path; from support.servers import running\n"
        "from towline.local.servers import NatsServer\n"
        "for server in running(NatsServer(Path(sys.argv[1]))):\n"
        "    print(server.pid, flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", session, str(tmp_path / "nats")], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert psutil.pid_exists(pid)
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 15.0
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
