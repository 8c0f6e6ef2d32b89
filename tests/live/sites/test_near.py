"""A near site: a leaf without JetStream, whose clients work on home's streams as if they were there."""

from __future__ import annotations

from pathlib import Path

import pytest

from live.sites.pair import ACCOUNT, HOST, free_port, server, settings_of
from support.waiting import until
from towline.access.credentials import bus_users
from towline.access.identity import bus_as
from towline.access.init import prepare_bus
from towline.access.nats_config import Account, users_config
from towline.access.roles import BUFFER, ROLES, WORKER
from towline.access.sites import SEED_VARIABLE, home_config, leaf_users
from towline.bus.client import Bus
from towline.bus.topology import REPLICAS, TRAJECTORY
from towline.config import BusSettings
from towline.errors import UnavailableError, UsageError

NEAR = "near"


@pytest.mark.parametrize("walls", [True, False])
async def test_a_near_worker_pulls_its_tasks_says_who_it_is_and_may_no_more_than_at_home(
    tmp_path: Path, run_name: str, walls: bool
) -> None:
    home_port, door, near_port = (free_port() for _ in range(3))
    keys = tmp_path / "keys"
    leaf = leaf_users(keys, [NEAR])
    accounts = [Account(ACCOUNT, [run_name], bus_users(keys, ROLES), walls=walls, near=leaf)]
    home_file, near_file = tmp_path / "home.conf", tmp_path / "near.conf"
    home_file.write_text(
        f'listen: "{HOST}:{home_port}"\njetstream {{ store_dir: "{tmp_path / "js"}", domain: home }}\n'
        f"{home_config(f'{HOST}:{door}')}{users_config(accounts)}"
    )
    near_file.write_text(
        f'listen: "{HOST}:{near_port}"\nleafnodes {{ remotes: [ {{ url: "nats-leaf://{HOST}:{door}", account: "{ACCOUNT}", '
        f"nkey: ${SEED_VARIABLE} }} ] }}\n{users_config(accounts, home_domain='home')}"
    )
    seed = (keys / f"leaf-{NEAR}.nk").read_text().strip()
    common = BusSettings(keys_folder=str(keys), budget_bytes=64 << 20)
    at_home, at_near = (common.model_copy(update={"url": f"nats://{HOST}:{port}"}) for port in (home_port, near_port))
    async with server(home_file, home_port, {}), server(near_file, near_port, {SEED_VARIABLE: seed}):
        await prepare_bus(settings_of(run_name, at_home))
        buffer = await Bus.connect(bus_as(at_home, BUFFER), run=run_name, client_name="buffer")
        worker = await Bus.connect(bus_as(at_near, WORKER), run=run_name, client_name="worker")
        names = buffer.topology
        await buffer.publish(names.task("train"), b"a task")
        lane = await worker.consumer(names.lane_consumer("train", 4))
        taken: list[bytes] = []

        async def fetched() -> bool:
            for delivery in await lane.fetch(4, 1.0):
                taken.append(delivery.data)
                await delivery.ack()
            return bool(taken)

        await until(fetched)
        assert taken == [b"a task"]
        assert (await worker.create(names.trajectory(0, 0), b"a sample")).won
        assert not (await worker.create(names.trajectory(0, 0), b"another")).won
        assert [message.data async for message in buffer.read(TRAJECTORY, follow=False)] == [b"a sample"]
        await worker.kv(REPLICAS).put("w-near", b"here")
        assert await buffer.kv(REPLICAS).get("w-near") == b"here"
        with pytest.raises(UsageError, match="refuses role rollout-worker to publish"):
            await worker.publish(names.control("end"), b"not a worker's to say")
        with pytest.raises((UsageError, UnavailableError)):  # where roles share an account, the server names the mapped subject
            await worker.connection.request(f"$JS.API.STREAM.PURGE.{names.stream(TRAJECTORY)}", b"", seconds=3.0)
        assert (await buffer.stream_state(TRAJECTORY)).messages == 1
        await worker.close()
        await buffer.close()
