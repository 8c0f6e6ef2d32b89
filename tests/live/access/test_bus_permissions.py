"""Each role does its own on the bus and is refused everything else, in an account that all share as in one of its own. The
tables (table.py) are written by hand, not taken from the code."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from live.access.table import BUFFER, INIT, MAY_PUBLISH, MAY_SUBSCRIBE, OPERATOR, REWARD, RUN, WORKER
from support.servers import running
from towline.access.credentials import bus_users
from towline.access.nats_config import Account, users_config
from towline.access.roles import ROLES
from towline.bus.client import Bus
from towline.bus.consumer import Consumer
from towline.bus.topology import CONTROL
from towline.config import BusSettings
from towline.errors import UsageError
from towline.local.servers import NatsServer


@pytest.fixture(scope="module", params=[False, True], ids=["one-account", "walls"])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder = tmp_path_factory.mktemp("guarded")
    accounts = [
        Account(name, [RUN], bus_users(folder / name, ROLES), walls=request.param) for name in ("first", "second", "third")
    ]
    yield from running(NatsServer(folder / "nats", authorization=users_config(accounts)))


def settings(server: NatsServer, tenant: str, role: str) -> BusSettings:
    keys = str(server.folder.parent / tenant)
    return server.settings(BusSettings(keys_folder=keys, role=role, budget_bytes=64 << 20))


@pytest.fixture
async def made(guarded: NatsServer) -> None:
    """The run's streams, in the first tenant's account."""
    bus = await Bus.connect(settings(guarded, "first", INIT), run=RUN, client_name="init")
    await bus.ensure()
    await bus.close()


async def raw(server: NatsServer, role: str, refused: list[str]) -> Client:
    """nats-py's own client: nothing of Towline's stands between the table and the server."""

    async def note(error: Exception) -> None:
        refused.append(str(error).lower())

    seed = (server.folder.parent / "first" / f"{role}.nk").read_text()
    return await nats.connect(server.url, nkeys_seed_str=seed, error_cb=note, allow_reconnect=False)


async def refusals(client: Client, refused: list[str], verb: str, subjects: dict[str, set[str]]) -> set[str]:
    """After the refusal of a last subject that nobody has: the server answers in order."""
    await (client.publish("last.of.all", b"") if verb == "publish" else client.subscribe("last.of.all"))
    async with asyncio.timeout(10):
        while not any("last.of.all" in reason for reason in refused):
            await client.flush()
    return {
        subject for subject in subjects if any(f'permissions violation for {verb} to "{subject.lower()}"' in r for r in refused)
    }


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("role", ROLES)
async def test_a_role_may_publish_what_is_its_own_and_nothing_else(
    guarded: NatsServer, role: str, request: pytest.FixtureRequest
) -> None:
    refused: list[str] = []
    client = await raw(guarded, role, refused)
    for subject in MAY_PUBLISH:
        # A body that no JetStream request takes: what is allowed is answered with an error, and changes nothing.
        await client.publish(subject, b"not JSON")
    found = await refusals(client, refused, "publish", MAY_PUBLISH)
    await client.close()
    expected = {subject for subject, roles in MAY_PUBLISH.items() if role not in roles}
    if "walls" in request.node.name:
        expected.add("_INBOX.gateway.x")  # a worker's answer goes by the server's name for who asked, whom it doesn't know
    assert found == expected


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_hears_its_own_answers_and_hints_and_nothing_else(guarded: NatsServer, role: str) -> None:
    refused: list[str] = []
    client = await raw(guarded, role, refused)
    for subject in MAY_SUBSCRIBE:
        await client.subscribe(subject)
    found = await refusals(client, refused, "subscription", MAY_SUBSCRIBE)
    await client.close()
    assert found == {subject for subject, roles in MAY_SUBSCRIBE.items() if role not in roles}


@pytest.mark.usefixtures("made")
async def test_two_tenants_with_a_run_of_the_same_name_see_nothing_of_each_other(guarded: NatsServer) -> None:
    buffer = await Bus.connect(settings(guarded, "first", BUFFER), run=RUN, client_name="a")
    await buffer.publish(buffer.topology.control("batch"), b"theirs")
    init = await Bus.connect(settings(guarded, "second", INIT), run=RUN, client_name="b")
    await init.ensure()
    other = await Bus.connect(settings(guarded, "second", OPERATOR), run=RUN, client_name="c")
    assert (await other.stream_state(CONTROL)).messages == 0
    assert (await buffer.stream_state(CONTROL)).messages > 0
    for bus in (buffer, init, other):
        await bus.close()


async def test_a_stranger_is_turned_away(guarded: NatsServer, tmp_path: Path) -> None:
    bus_users(tmp_path, [BUFFER])
    for stranger in (BusSettings(), BusSettings(keys_folder=str(tmp_path), role=BUFFER), BusSettings(user="buffer")):
        with pytest.raises(UsageError, match="refuses the user"):
            await Bus.connect(BusSettings(url=guarded.url, **stranger.model_dump(exclude={"url"})), run=RUN, client_name="x")


@pytest.mark.usefixtures("made")
async def test_what_a_role_lacks_is_one_clear_line(guarded: NatsServer) -> None:
    bus = await Bus.connect(settings(guarded, "first", REWARD), run=RUN, client_name="r")
    line = rf"refuses role reward to publish to {bus.topology.control('batch')}: `towline access show reward`"
    async with asyncio.timeout(5):
        with pytest.raises(UsageError, match=line):
            await bus.publish(bus.topology.control("batch"), b"forged")
        with pytest.raises(UsageError, match=line):  # at once, without asking again
            await bus.publish(bus.topology.control("batch"), b"forged")
    await bus.close()


async def test_a_service_before_init_says_that_it_may_not_make_streams(guarded: NatsServer) -> None:
    bus = await Bus.connect(settings(guarded, "third", REWARD), run=RUN, client_name="r")
    async with asyncio.timeout(5):
        with pytest.raises(UsageError, match=r"refuses role reward to publish to \$JS\.API\.STREAM\.CREATE.*towline init"):
            await bus.ensure()
    await bus.close()


@pytest.mark.usefixtures("made")
async def test_a_pull_that_is_refused_is_told_and_not_waited_for(guarded: NatsServer) -> None:
    """Nobody waits for a pull's answer: the refusal has to reach the one who fetches all the same."""
    buffer = await Bus.connect(settings(guarded, "first", BUFFER), run=RUN, client_name="b")
    consumer = Consumer(buffer.jetstream, buffer.topology.lane_consumer("train", 1), None)
    async with asyncio.timeout(10):
        with pytest.raises(UsageError, match=r"refuses role buffer to publish to .*MSG\.NEXT.*lane-train"):
            await consumer.fetch(1, 0.2)
    await consumer.close()
    await buffer.close()


@pytest.mark.usefixtures("made")
async def test_a_message_that_nobody_waits_for_ends_nothing_where_it_is_refused(
    guarded: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker that may not answer somebody goes on with its work, and says so once."""
    bus = await Bus.connect(settings(guarded, "first", WORKER), run=RUN, client_name="w")
    for _ in range(3):
        await bus.connection.send("_INBOX.stranger.one", b"chunk")
        assert (await bus.stream_state(CONTROL)).bytes >= 0  # its answer comes after the refusal
    assert capsys.readouterr().out.count("refuses role rollout-worker to publish to _INBOX.stranger.one") == 1
    await bus.publish(bus.topology.failure(1, 0), b"goes on")
    await bus.close()


async def test_answers_that_could_never_arrive_are_a_refusal_at_the_start(guarded: NatsServer) -> None:
    wrong = settings(guarded, "first", BUFFER).model_copy(update={"inbox_prefix": "_INBOX.trainer"})
    with pytest.raises(UsageError, match=r"refuses role buffer to subscribe to _INBOX\.trainer\."):
        await Bus.connect(wrong, run=RUN, client_name="x")
