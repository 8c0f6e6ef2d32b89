"""Walls in a cluster of three servers, streams of three copies, every role at another server than the one before it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from support.servers import running
from support.waiting import until
from towline.access.credentials import bus_users
from towline.access.nats_config import Account, users_config
from towline.access.roles import BUFFER, GATEWAY, INIT, PUBLISHER, REWARD, ROLES, TRAINER, VIEWER, WORKER
from towline.bus.client import Bus
from towline.bus.control_log import ControlLog
from towline.bus.topology import CONTROL, TRAJECTORY
from towline.bus.wire import Unsettled
from towline.config import BusSettings
from towline.errors import UnavailableError
from towline.local.servers import NatsServer

RUN = "one"
SERVERS = 3
TASKS = 600


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[NatsServer]]:
    users = users_config([Account("tenant", [RUN], bus_users(tmp_path / "keys", ROLES), walls=True)])
    ports = [_free_port() for _ in range(SERVERS)]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.contextmanager(running)(NatsServer(
                tmp_path / f"s{port}", max_store_bytes=4 << 30,
                authorization=f'{users}cluster {{ name: c, listen: "127.0.0.1:{port}", routes: [{routes}] }}\n',
            )))
            for port in ports
        ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SERVERS))
async def test_every_role_does_its_work_from_any_server_of_a_cluster(
    cluster: list[NatsServer], tmp_path: Path, first: int
) -> None:
    place = first

    async def connected(role: str) -> Bus:
        nonlocal place
        place += 1
        settings = BusSettings(
            url=cluster[place % SERVERS].url, keys_folder=str(tmp_path / "keys"), role=role, replicas=3, budget_bytes=256 << 20
        )
        return await Bus.connect(settings, run=RUN, client_name=role)

    async with contextlib.AsyncExitStack() as stack:

        async def get(role: str) -> Bus:
            bus = await connected(role)
            stack.push_async_callback(bus.close)
            return bus

        init = await get(INIT)

        async def made() -> bool:
            try:
                await init.ensure()
            except UnavailableError:  # the three haven't agreed on a leader yet
                return False
            return True

        await until(made, 60)
        buffer, worker, reward, trainer = [await get(role) for role in (BUFFER, WORKER, REWARD, TRAINER)]
        gateway, publisher, viewer = [await get(role) for role in (GATEWAY, PUBLISHER, VIEWER)]
        names = buffer.topology

        log = ControlLog(buffer, "w")
        await log.take_over()
        tasks = await log.append([(names.task("train"), b"task %d" % number) for number in range(TASKS)])
        lane = await worker.consumer(names.lane_consumer("train", TASKS))
        taken: list[int] = []
        while len(taken) < TASKS:
            for delivery in await lane.fetch(100, 10):
                assert delivery.num_delivered == 1
                await delivery.ack()
                taken.append(delivery.sequence)
        assert sorted(taken) == tasks
        assert [message.sequence async for message in viewer.read(CONTROL, follow=False)] == [tasks[0] - 1, *tasks]

        placed = [(names.trajectory(number, 0), b"%d" % number) for number in range(100)]
        places = [(subject, (await worker.create(subject, data)).sequence) for subject, data in placed]
        sequences = [sequence for _, sequence in places]
        found = await trainer.get_many(TRAJECTORY, sequences)
        assert [message.data for message in found if message is not None] == [data for _, data in placed]
        together = await trainer.get_together(TRAJECTORY, places)
        assert together
        assert all(message.data == placed[sequences.index(sequence)][1] for sequence, message in together.items())
        assert await reward.create_all([(names.score(1, number), b"score") for number in range(16)]) is not None
        assert await reward.create_all([(names.score(1, 3), b"other")]) is None

        heard: list[bytes] = []
        answering: set[asyncio.Task[None]] = set()

        async def answer(message: Msg) -> None:
            for number in range(20):
                await worker.connection.send(message.reply, b"%d" % number)
            await worker.connection.send(message.reply, b"", headers={"Status": "200"})

        def take(message: Msg) -> None:
            answering.add(asyncio.create_task(answer(message)))

        await worker.connection.subscribe(names.policy("committed"), lambda message: heard.append(message.data))
        await worker.connection.subscribe(names.serve("w0"), take)

        async def hinted() -> bool:  # a subscription takes its time to the other servers
            await publisher.publish(names.policy("committed"), b"hint")
            return b"hint" in heard

        await until(hinted)
        arrived: list[Msg] = []

        async def served() -> bool:
            arrived.clear()
            with contextlib.suppress(Unsettled):
                await gateway.connection.request_many(names.serve("w0"), b"", arrived, seconds=10)
            return bool(arrived)

        await until(served)
        assert [message.data for message in arrived] == [b"%d" % number for number in range(20)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
