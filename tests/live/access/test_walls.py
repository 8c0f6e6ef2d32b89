"""A stolen key against a real nats-server: what JetStream answers or delivers for it reaches nothing beyond its role.

The server's own account of itself (its monitor) says what changed, not the bus's clients.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from live.access.table import API, BUFFER, GATEWAY, INIT, MAY_PUBLISH, PUBLISHER, READ_CONTROL, RUN, TRAINER, VIEWER, WORKER, S
from support.servers import running
from support.waiting import until
from towline.access.credentials import bus_users
from towline.access.init import prepare_bus
from towline.access.nats_config import Account, users_config
from towline.access.roles import ROLES
from towline.access.tenants import write_tenant
from towline.access.walls import ASKED_SECONDS
from towline.bus.client import Bus
from towline.bus.topology import CONTROL, POLICY
from towline.bus.wire import Unsettled
from towline.config import BusSettings, Settings
from towline.errors import UnavailableError, UsageError
from towline.local.servers import NatsServer

THIEF = "thief"
"""The names of consumers that the tests' thieves make for themselves begin so."""
NOTHING_THERE = b'{"seq": 999999}'
Picture = dict[str, tuple[int, int, int, dict[str, Any]]]


def bus_of(server: NatsServer, role: str) -> BusSettings:
    keys = str(server.folder.parent / "tenant")
    return server.settings(BusSettings(keys_folder=keys, role=role, budget_bytes=64 << 20))


async def connected(server: NatsServer, role: str) -> Bus:
    return await Bus.connect(bus_of(server, role), run=RUN, client_name=role)


async def raw(server: NatsServer, role: str) -> Client:
    """nats-py's own client with the role's key."""

    async def ignore(error: Exception) -> None:
        pass

    mine = server.folder.parent / "tenant" / f"{role}.nk"
    known = {"nkeys_seed_str": mine.read_text()} if mine.is_file() else {"user_credentials": str(mine.with_suffix(".creds"))}
    return await nats.connect(server.url, inbox_prefix=f"_INBOX.{role}", error_cb=ignore, **known)


def picture(server: NatsServer) -> Picture:
    """Every stream that the server has: first and last sequence, messages, and the consumers that aren't a thief's."""
    url = f"http://127.0.0.1:{server.state['ports']['monitor']}/jsz?accounts=true&streams=true&consumers=true&config=true"
    found: Picture = {}
    for account in httpx.get(url, trust_env=False).raise_for_status().json().get("account_details") or []:
        for stream in account.get("stream_detail") or []:
            consumers = {c["name"]: c["config"] for c in stream.get("consumer_detail") or [] if not c["name"].startswith(THIEF)}
            state = stream["state"]
            found[stream["name"]] = state["first_seq"], state["last_seq"], state["messages"], consumers
    return found


async def begun(server: NatsServer) -> None:
    """A run's streams and consumers. Message 1 of CONTROL is, word for word, a request that changes a lane's consumer."""
    tree = {
        "run": {"name": RUN}, "model": {"source": "m"}, "prompts": {"source": "a:b"}, "sampling": {"max_tokens": 1},
        "reward": {"function": "a:b"}, "bus": bus_of(server, INIT).model_dump(exclude_defaults=True),
    }  # fmt: skip
    await prepare_bus(Settings.model_validate(tree))
    lane = picture(server)[f"{S}_CONTROL"][3]["lane-train"]
    buffer = await connected(server, BUFFER)
    await buffer.publish(
        buffer.topology.control("batch"),
        json.dumps({"stream_name": f"{S}_CONTROL", "config": lane | {"max_ack_pending": 1}}).encode(),
    )
    await buffer.close()
    worker = await connected(server, WORKER)
    await worker.publish(worker.topology.trajectory(1, 0), b"a sample")
    await worker.close()


@pytest.fixture(scope="module", params=["nkeys", pytest.param("tokens", marks=pytest.mark.slow)])
def walled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder = tmp_path_factory.mktemp("walled")
    if request.param == "tokens":
        users = write_tenant(folder, "tenant", [RUN], walls=True)
    else:
        users = users_config([Account("tenant", [RUN], bus_users(folder / "tenant", ROLES), walls=True)])
    yield from running(NatsServer(folder / "nats", authorization=users))


@pytest.fixture
async def run(walled: NatsServer) -> NatsServer:
    if f"{S}_CONTROL" not in picture(walled):
        await begun(walled)
    return walled


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[NatsServer]:
    """With one account for all roles."""
    users = users_config([Account("tenant", [RUN], bus_users(tmp_path / "tenant", ROLES))])
    yield from running(NatsServer(tmp_path / "nats", authorization=users))


def forbidden(role: str) -> list[str]:
    return [subject for subject, who in MAY_PUBLISH.items() if role not in who]


async def ask_for(thief: Client, role: str, target: str) -> None:
    """All kinds of answers that the role can have, sent to `target`: an answer in JSON, one without a body, one of chosen bytes,
    and a consumer's delivery."""
    await thief.publish(f"{API}.STREAM.INFO.{S}_CONTROL", b"", reply=target)
    if role != INIT:
        await thief.publish(f"{API}.DIRECT.GET.{S}_CONTROL", NOTHING_THERE, reply=target)
        await thief.publish(f"{API}.DIRECT.GET.{S}_CONTROL", b'{"seq": 1}', reply=target)
        await thief.publish(f"{API}.STREAM.MSG.GET.{S}_CONTROL", b'{"seq": 1}', reply=target)
    if role in READ_CONTROL:
        await thief.publish(f"{API}.CONSUMER.MSG.NEXT.{S}_CONTROL.{THIEF}", b'{"batch": 9, "no_wait": true}', reply=target)


async def settled(thief: Client, role: str) -> None:
    """The server has answered what was asked before."""
    await thief.request(f"{API}.STREAM.INFO.{S}_CONTROL", b"", timeout=10)
    if role != INIT:
        await thief.request(f"{API}.DIRECT.GET.{S}_CONTROL", NOTHING_THERE, timeout=10)
    await asyncio.sleep(0.2)  # what an answer sets off has no answer of its own


async def own_consumer(thief: Client, stream: str, **config: object) -> dict[str, Any]:
    name = str(config.get("name", THIEF))
    body = {"stream_name": stream, "config": {"name": name, "deliver_policy": "all", "ack_policy": "none", **config}}
    answer = await thief.request(f"{API}.CONSUMER.CREATE.{stream}.{name}", json.dumps(body).encode(), timeout=10)
    found: dict[str, Any] = json.loads(answer.data)
    return found


@pytest.mark.parametrize("role", ROLES)
async def test_an_answer_goes_where_its_asker_may_write_or_nowhere(run: NatsServer, role: str) -> None:
    heard: list[Msg] = []

    async def hear(message: Msg) -> None:
        heard.append(message)

    others = [await raw(run, other) for other in ROLES if other != role]
    for other, client in zip([other for other in ROLES if other != role], others, strict=True):
        await client.subscribe(f"_INBOX.{other}.x", cb=hear)
        await client.flush()
    thief = await raw(run, role)
    if role in READ_CONTROL:
        assert "error" not in await own_consumer(thief, f"{S}_CONTROL")
    before = picture(run)
    for target in forbidden(role):
        await ask_for(thief, role, target)
    await settled(thief, role)
    assert picture(run) == before
    for client in others:
        await client.flush()
        await client.close()
    assert not heard
    await thief.close()


async def test_without_walls_a_viewers_key_writes_into_control_and_deletes_streams(shared: NatsServer) -> None:
    """What the walls are for; and the test above would see it."""
    await begun(shared)
    end = picture(shared)[f"{S}_CONTROL"][1]
    thief = await raw(shared, VIEWER)
    await thief.publish(f"{API}.STREAM.INFO.{S}_CONTROL", b"", reply=f"towline.{RUN}.control.batch")
    await until(lambda: picture(shared)[f"{S}_CONTROL"][1] == end + 1)
    await thief.publish(f"{API}.DIRECT.GET.{S}_CONTROL", b'{"seq": 1}', reply=f"{API}.CONSUMER.CREATE.{S}_CONTROL.lane-train")
    await until(lambda: picture(shared)[f"{S}_CONTROL"][3]["lane-train"]["max_ack_pending"] == 1)
    await thief.publish(f"{API}.DIRECT.GET.{S}_CONTROL", NOTHING_THERE, reply=f"{API}.STREAM.DELETE.{S}_TRAJECTORY")
    await until(lambda: f"{S}_TRAJECTORY" not in picture(shared))
    await thief.close()


@pytest.mark.parametrize("target", ["control.batch", "policy.refused", "policy.committed", "outcome.score.5.0", "dead.rollout"])
async def test_a_consumer_that_delivers_by_itself_delivers_to_nobody(run: NatsServer, target: str) -> None:
    """JetStream delivers where its maker says, in the account of the streams: to whom has subscribed to just that, if anybody.
    Nobody does there; those who hear hints do in their own accounts."""
    trainer, thief = await connected(run, TRAINER), await raw(run, VIEWER)
    heard: list[Msg] = []
    await trainer.connection.subscribe(trainer.topology.policy("refused"), heard.append)
    await trainer.connection.subscribe(trainer.topology.policy("committed"), heard.append)
    await trainer.stream_state(CONTROL)
    before = picture(run)
    made = await own_consumer(thief, f"{S}_TRAJECTORY", name=f"{THIEF}-push", deliver_subject=f"towline.{RUN}.{target}")
    assert "error" not in made
    await settled(thief, VIEWER)
    assert picture(run) == before
    assert not heard
    await thief.request(f"{API}.CONSUMER.DELETE.{S}_TRAJECTORY.{THIEF}-push", b"", timeout=10)
    await thief.close()
    await trainer.close()


async def test_without_walls_such_a_consumer_tells_a_trainer_what_no_publisher_said(shared: NatsServer) -> None:
    await begun(shared)
    trainer, thief = await connected(shared, TRAINER), await raw(shared, VIEWER)
    heard: list[Msg] = []
    await trainer.connection.subscribe(trainer.topology.policy("refused"), heard.append)
    await trainer.stream_state(CONTROL)
    await own_consumer(thief, f"{S}_TRAJECTORY", name=f"{THIEF}-push", deliver_subject=f"towline.{RUN}.policy.refused")
    await until(lambda: bool(heard))
    await thief.close()
    await trainer.close()


async def test_a_run_is_added_by_a_reload_and_who_is_connected_stays(tmp_path: Path, run_name: str) -> None:
    keys, users = tmp_path / "tenant", tmp_path / "users.conf"

    def write(*runs: str) -> None:
        users.write_text(users_config([Account("tenant", runs, bus_users(keys, ROLES), walls=True)]))

    write(RUN)
    for server in running(NatsServer(tmp_path / "nats", authorization='include "../users.conf"')):
        await begun(server)
        worker, own = await connected(server, WORKER), bus_of(server, INIT)
        lost: list[bool] = []
        worker.connection.on_change(lambda lost=lost: lost.append(True))
        write(RUN, run_name)
        os.kill(server.pid or 0, signal.SIGHUP)

        async def makes(own: BusSettings = own) -> bool:
            bus = await Bus.connect(own, run=run_name, client_name="init", patience_seconds=0.5)
            try:
                await bus.ensure()
            except (UsageError, UnavailableError):  # the server hasn't read it yet
                return False
            finally:
                await bus.close()
            return True

        await until(makes)
        assert await worker.publish(worker.topology.trajectory(2, 0), b"another") == 2
        assert not lost
        await worker.close()


async def test_who_asks_for_one_task_is_given_one_and_acks_it(run: NatsServer) -> None:
    """What a role imports twice would go out twice."""
    worker, buffer = await connected(run, WORKER), await connected(run, BUFFER)
    for _ in range(5):
        await buffer.publish(buffer.topology.task("train"), b"a task")
    spec = worker.topology.lane_consumer("train", 8)
    lane = await worker.consumer(spec)

    async def out() -> tuple[int, int]:
        found = await buffer.jetstream.call("look", f"CONSUMER.INFO.{spec.stream}.{spec.durable}")
        return found["num_ack_pending"], found["num_pending"]

    taken = await lane.fetch(1, 5)
    assert len(taken) == 1
    assert await out() == (1, 4)
    await taken[0].ack()
    await until(lambda: _is(out(), (0, 4)))
    assert len(await lane.fetch(4, 5)) == 4
    assert await out() == (4, 0)
    await lane.close()
    await worker.close()
    await buffer.close()


@pytest.mark.slow
async def test_what_comes_after_a_long_silence_still_arrives(run: NatsServer) -> None:
    """The server forgets a request that is silent for too long: a reader's never is, and who waits for work asks again."""
    viewer, publisher, trainer = [await connected(run, role) for role in (VIEWER, PUBLISHER, TRAINER)]
    end = (await viewer.stream_state(POLICY)).last_sequence
    read: list[bytes] = []

    async def follow() -> None:
        async for message in viewer.read(POLICY, start=end + 1):
            read.append(message.data)

    following = asyncio.create_task(follow())
    consumer = await publisher.consumer(publisher.topology.publisher_consumer())
    waiting = asyncio.create_task(consumer.fetch(1, 120))
    await trainer.publish(trainer.topology.policy("opened"), b"before")
    await until(lambda: read == [b"before"])
    readers = {name for name in picture(run)[f"{S}_POLICY"][3] if name != "publisher"}
    await asyncio.sleep(2 * ASKED_SECONDS + 5)  # after it, and again after it, the server looks for what it may forget
    await trainer.publish(trainer.topology.policy("staged"), b"after")
    await until(lambda: read == [b"before", b"after"])
    assert [delivery.data for delivery in await waiting] == [b"after"]
    assert {name for name in picture(run)[f"{S}_POLICY"][3] if name != "publisher"} == readers
    following.cancel()
    for bus in (viewer, publisher, trainer):
        await bus.close()


async def _is(found: Awaitable[tuple[int, int]], wanted: tuple[int, int]) -> bool:
    return await found == wanted


async def test_hints_go_from_role_to_role(run: NatsServer) -> None:
    trainer, publisher, worker = [await connected(run, role) for role in (TRAINER, PUBLISHER, WORKER)]
    heard: list[tuple[str, str, bytes]] = []

    def note(name: str, kind: str) -> Callable[[Msg], None]:
        return lambda message: heard.append((name, kind, message.data))

    for name, bus, kind in (("trainer", trainer, "committed"), ("worker", worker, "committed"), ("worker", worker, "opened")):
        await bus.connection.subscribe(bus.topology.policy(kind), note(name, kind))
    for bus in (trainer, worker):
        await bus.stream_state(CONTROL)  # answered after the subscriptions are there
    before = picture(run)[f"{S}_POLICY"][1]
    await publisher.publish(publisher.topology.policy("committed"), b"one")
    await trainer.publish(trainer.topology.policy("opened"), b"two")
    await until(lambda: len(heard) >= 3)
    assert sorted(heard) == [("trainer", "committed", b"one"), ("worker", "committed", b"one"), ("worker", "opened", b"two")]
    assert picture(run)[f"{S}_POLICY"][1] == before + 2
    for bus in (trainer, publisher, worker):
        await bus.close()


async def test_a_request_to_a_replica_is_answered_by_many_messages_and_taken_back(run: NatsServer) -> None:
    gateway, worker = await connected(run, GATEWAY), await connected(run, WORKER)
    cancelled: list[bytes] = []
    answering: set[asyncio.Task[None]] = set()

    async def answer(message: Msg) -> None:
        for number in range(100):
            await worker.connection.send(message.reply, message.data + b" %d" % number)
        await worker.connection.send(message.reply, b"", headers={"Status": "200"})

    def take(message: Msg) -> None:
        task = asyncio.create_task(answer(message))
        answering.add(task)
        task.add_done_callback(answering.discard)

    await worker.connection.subscribe(worker.topology.serve("w0"), take)
    await worker.connection.subscribe(f"{worker.topology.serve('w0')}.cancel", lambda message: cancelled.append(message.data))
    await worker.stream_state(CONTROL)  # answered after the subscriptions are there
    arrived: list[Msg] = []
    end = await gateway.connection.request_many(gateway.topology.serve("w0"), b"asked", arrived, seconds=10)
    assert (end.headers or {})["Status"] == "200"
    assert [message.data for message in arrived] == [b"asked %d" % number for number in range(100)]
    await gateway.connection.send(f"{gateway.topology.serve('w0')}.cancel", b"enough")
    await until(lambda: cancelled == [b"enough"])
    with pytest.raises(Unsettled, match="nobody answers"):
        await gateway.connection.request(gateway.topology.serve("w1"), b"", seconds=10)
    await gateway.close()
    await worker.close()
