"""The second cluster's leaf node for real: two bus servers, the leaf's with the configuration that it has in the cluster."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import nkeys
import pytest

from manifests.rendered import FOLDER
from support.waiting import until
from towline.access.credentials import new_seed, public_key
from towline.access.identity import bus_as
from towline.bus.client import Bus
from towline.bus.topology import CONTROL, TRAJECTORY
from towline.config import BusSettings
from towline.errors import UsageError

RUN = "demo"
BINARIES = Path(sys.executable).parent
LEAF = FOLDER / "components/two-cluster/nats.conf"


@asynccontextmanager
async def _server(path: Path, environment: dict[str, str], port: int) -> AsyncIterator[BusSettings]:
    process = await asyncio.create_subprocess_exec(
        BINARIES / "nats-server", "-c", path, env=environment, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await until(lambda: _listens(port))
        yield BusSettings(url=f"nats://127.0.0.1:{port}", keys_folder=str(path.parent / "access"), budget_bytes=64 << 20)
    finally:
        process.terminate()
        await process.wait()


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[tuple[BusSettings, BusSettings]]:
    """Home's and leaf's addresses, with the users of `towline access nats` on both."""
    making = await asyncio.create_subprocess_exec(
        BINARIES / "towline", "access", "nats", "--run", RUN, "--out", tmp_path / "access", stdout=asyncio.subprocess.DEVNULL
    )
    assert await making.wait() == 0
    leaf_seed = tmp_path / "leaf.nk"
    leaf_seed.write_text(new_seed(nkeys.PREFIX_BYTE_USER))
    home_port, door, leaf_port = (_free_port() for _ in range(3))
    home = tmp_path / "home.conf"
    home.write_text(
        f'server_name: home\nlisten: "127.0.0.1:{home_port}"\njetstream {{ store_dir: "{tmp_path / "data"}" }}\n'
        f'leafnodes {{ listen: "127.0.0.1:{door}"\n authorization {{ nkey: {public_key(leaf_seed)}, account: "towline" }} }}\n'
        'include "access/nats.conf"\n'
    )
    leaf = tmp_path / "leaf.conf"
    text = LEAF.read_text().replace(', tls: { ca_file: "/etc/nats/leaf/ca.pem" }', "").replace('http: "0.0.0.0:8222"', "")
    leaf.write_text(text.replace("0.0.0.0:4222", f"127.0.0.1:{leaf_port}"))
    environment = {"POD_NAME": "leaf", "HOME_LEAF_URL": f"nats://127.0.0.1:{door}", "LEAF_SEED": leaf_seed.read_text()}
    async with _server(home, {}, home_port) as at_home, _server(leaf, environment, leaf_port) as at_leaf:
        yield at_home, at_leaf


async def test_a_worker_at_the_leaf_works_on_the_homes_streams_and_may_no_more_than_at_home(
    both: tuple[BusSettings, BusSettings],
) -> None:
    at_home, at_leaf = both

    async def connect(settings: BusSettings, role: str) -> Bus:
        return await Bus.connect(bus_as(settings, role), run=RUN, client_name=role, patience_seconds=15)

    init = await connect(at_home, "init")
    worker = await connect(at_leaf, "rollout-worker")
    reader = await connect(at_home, "viewer")
    try:
        await init.ensure()
        sequence = await worker.publish(worker.topology.trajectory(1, 0), b"sampled far away")
        assert (await reader.get(TRAJECTORY, sequence)).data == b"sampled far away"
        with pytest.raises(UsageError):
            await worker.publish(worker.topology.control("end"), b"not a worker's to say")
        assert (await reader.stream_state(CONTROL)).messages == 0
    finally:
        for bus in (init, worker, reader):
            await bus.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
