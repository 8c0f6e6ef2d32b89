"""Each role does its own on the bus and is refused everything else. The tables are written by hand, not taken from the code."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

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

RUN, OTHER = "one", "other"
TRAINER, WORKER, REWARD, BUFFER, PUBLISHER, GATEWAY = "trainer", "rollout-worker", "reward", "buffer", "publisher", "gateway"
OPERATOR, VIEWER, GC, INIT = "operator", "viewer", "gc", "init"
SERVICES = {TRAINER, WORKER, REWARD, BUFFER, PUBLISHER, GATEWAY}
PEOPLE = {OPERATOR, VIEWER}
READERS = PEOPLE | {GATEWAY}  # whose web view shows everything
READ_CONTROL = {TRAINER, WORKER, BUFFER, GATEWAY} | PEOPLE
API = "$JS.API"
S = f"towline_{RUN}"

MAY_PUBLISH: dict[str, set[str]] = {
    # CONTROL is the buffer's
    **{f"towline.{RUN}.control.{kind}": {BUFFER} for kind in ("writer", "batch", "drop", "end", "snapshot", "fork", "admit")},
    f"towline.{RUN}.control.task.train": {BUFFER},
    f"towline.{RUN}.control.task.eval.7": {BUFFER},
    f"towline.{RUN}.control.reissue.train": {BUFFER},
    # data
    f"towline.{RUN}.trajectory.5.0": {WORKER, GATEWAY},
    f"towline.{RUN}.trajectory.ext-5.0": {WORKER, GATEWAY},
    f"towline.{RUN}.outcome.score.5.0": {REWARD},
    f"towline.{RUN}.outcome.failure.5.0": {WORKER, REWARD, GATEWAY},
    f"towline.{RUN}.partial.5.0": {WORKER},
    f"towline.{RUN}.policy.opened": {TRAINER},
    f"towline.{RUN}.policy.staged": {TRAINER},
    f"towline.{RUN}.policy.committed": {PUBLISHER},
    f"towline.{RUN}.policy.refused": {PUBLISHER},
    f"towline.{RUN}.dead.rollout": {WORKER},
    f"towline.{RUN}.dead.partial": {WORKER},
    f"towline.{RUN}.dead.reward": {REWARD},
    f"towline.{RUN}.dead.publisher": {PUBLISHER},
    f"towline.{RUN}.dead.outcome": {BUFFER},
    f"towline.{RUN}.dead.requeue.3": {OPERATOR},
    f"towline.{RUN}.serve.w0": {GATEWAY},
    f"towline.{RUN}.serve.w0.cancel": {GATEWAY},
    # buckets
    f"$KV.{S}_status.buffer.0": {BUFFER},
    f"$KV.{S}_status.trainer.0": {TRAINER},
    f"$KV.{S}_status.rollout_worker.0": {WORKER},
    f"$KV.{S}_status.reward.0": {REWARD},
    f"$KV.{S}_status.publisher.0": {PUBLISHER},
    f"$KV.{S}_status.gateway.0": {GATEWAY},
    f"$KV.{S}_leases.buffer": {BUFFER},
    f"$KV.{S}_leases.trainer": {TRAINER},
    f"$KV.{S}_replicas.w0": {WORKER},
    f"$KV.{S}_acks.w0": {WORKER},
    f"$KV.{S}_sessions.a": {GATEWAY},
    f"$KV.{S}_idempotency.a.b": {GATEWAY},
    # another role's answers
    "_INBOX.gateway.x": {WORKER},
    **{f"_INBOX.{role}.x": set[str]() for role in ROLES if role != GATEWAY},
    # streams
    **{f"{API}.STREAM.CREATE.{S}_{key}": {INIT} for key in ("CONTROL", "TRAJECTORY", "DEAD")},
    f"{API}.STREAM.UPDATE.{S}_CONTROL": {INIT},
    f"{API}.STREAM.CREATE.KV_{S}_leases": {INIT},
    f"{API}.STREAM.DELETE.{S}_CONTROL": set(),
    f"{API}.STREAM.MSG.DELETE.{S}_CONTROL": set(),
    f"{API}.STREAM.DELETE.KV_{S}_leases": set(),
    f"{API}.STREAM.PURGE.{S}_CONTROL": {BUFFER},
    f"{API}.STREAM.PURGE.{S}_OUTCOME": {BUFFER},
    f"{API}.STREAM.PURGE.{S}_TRAJECTORY": {BUFFER},
    f"{API}.STREAM.PURGE.{S}_PARTIAL": {BUFFER},
    f"{API}.STREAM.PURGE.{S}_DEAD": {OPERATOR},
    f"{API}.STREAM.PURGE.{S}_POLICY": set(),
    f"{API}.STREAM.PURGE.KV_{S}_sessions": set(),
    f"{API}.STREAM.INFO.{S}_CONTROL": set(ROLES),
    f"{API}.STREAM.LIST": set(),
    f"{API}.STREAM.NAMES": set(),
    f"{API}.INFO": {OPERATOR, VIEWER, INIT},
    # single messages
    f"{API}.STREAM.MSG.GET.{S}_CONTROL": SERVICES | PEOPLE | {GC},
    f"{API}.STREAM.MSG.GET.{S}_TRAJECTORY": {TRAINER, WORKER, REWARD, BUFFER} | READERS,
    f"{API}.DIRECT.GET.{S}_TRAJECTORY": {TRAINER, WORKER, REWARD, BUFFER} | READERS,
    f"{API}.STREAM.MSG.GET.{S}_OUTCOME": {REWARD, BUFFER} | READERS,
    f"{API}.STREAM.MSG.GET.{S}_PARTIAL": {WORKER, BUFFER} | READERS,
    f"{API}.STREAM.MSG.GET.{S}_POLICY": {TRAINER, PUBLISHER} | READERS,
    f"{API}.STREAM.MSG.GET.{S}_DEAD": {BUFFER} | READERS,
    f"{API}.STREAM.MSG.GET.KV_{S}_sessions": READERS,
    f"{API}.STREAM.MSG.GET.KV_{S}_idempotency": READERS,
    f"{API}.STREAM.MSG.GET.KV_{S}_leases": {BUFFER, TRAINER} | READERS,
    # whole streams, by consumers of one's own
    f"{API}.CONSUMER.CREATE.{S}_CONTROL.r1": READ_CONTROL,
    f"{API}.CONSUMER.MSG.NEXT.{S}_CONTROL.r1": READ_CONTROL,
    f"{API}.CONSUMER.CREATE.{S}_TRAJECTORY.r1": {BUFFER} | READERS,
    f"{API}.CONSUMER.CREATE.{S}_OUTCOME.r1": {BUFFER} | READERS,
    f"{API}.CONSUMER.CREATE.{S}_PARTIAL.r1": READERS,
    f"{API}.CONSUMER.CREATE.{S}_POLICY.r1": READERS,
    f"{API}.CONSUMER.CREATE.{S}_DEAD.r1": {BUFFER} | READERS,
    f"{API}.CONSUMER.CREATE.KV_{S}_replicas.r1": {WORKER, BUFFER, GC} | READERS,
    f"{API}.CONSUMER.CREATE.KV_{S}_sessions.r1": READERS,
    # consumers that are shared
    f"{API}.CONSUMER.CREATE.{S}_CONTROL.lane-train": {WORKER, BUFFER, INIT},
    f"{API}.CONSUMER.MSG.NEXT.{S}_CONTROL.lane-train": {WORKER},
    f"{API}.CONSUMER.DELETE.{S}_CONTROL.lane-train": set(),
    f"$JS.ACK.{S}_CONTROL.lane-train.1.2.3.4.5": {WORKER},
    f"$JS.ACK.hub.ACCOUNT.{S}_CONTROL.lane-train.1.2.3.4.5.x": {WORKER},
    f"{API}.CONSUMER.MSG.NEXT.{S}_CONTROL.lane-session": {GATEWAY},
    f"$JS.ACK.{S}_CONTROL.lane-session.1.2.3.4.5": {GATEWAY, WORKER},
    f"{API}.CONSUMER.CREATE.{S}_TRAJECTORY.reward": {REWARD, BUFFER, INIT},
    f"{API}.CONSUMER.MSG.NEXT.{S}_TRAJECTORY.reward": {REWARD},
    f"{API}.CONSUMER.DELETE.{S}_TRAJECTORY.reward": {BUFFER},
    f"$JS.ACK.{S}_TRAJECTORY.reward.1.2.3.4.5": {REWARD},
    f"{API}.CONSUMER.MSG.NEXT.{S}_POLICY.publisher": {PUBLISHER},
    f"$JS.ACK.{S}_POLICY.publisher.1.2.3.4.5": {PUBLISHER},
    f"{API}.CONSUMER.INFO.{S}_POLICY.publisher": {PUBLISHER, BUFFER, INIT} | PEOPLE,
    f"{API}.CONSUMER.INFO.{S}_TRAJECTORY.reward": {REWARD, BUFFER, INIT} | PEOPLE,
    f"{API}.CONSUMER.INFO.{S}_CONTROL.lane-train": {WORKER, BUFFER, INIT} | PEOPLE,
    f"{API}.CONSUMER.CREATE.{S}_POLICY.publisher": {PUBLISHER, INIT},
    # A wildcard stands for a whole name, so whoever reads CONTROL could take an evaluation's tasks: docs/design/090-access.md
    f"{API}.CONSUMER.MSG.NEXT.{S}_CONTROL.lane-eval-7": READ_CONTROL,
    f"$JS.ACK.{S}_CONTROL.lane-eval-7.1.2.3.4.5": {WORKER},
    # what no run has, and another run
    "anything": set(),
    "$SYS.REQ.SERVER.PING": set(),
    f"towline.{OTHER}.control.batch": set(),
    f"towline.{OTHER}.trajectory.5.0": set(),
    f"{API}.STREAM.INFO.towline_{OTHER}_CONTROL": set(),
    f"$KV.towline_{OTHER}_status.buffer.0": set(),
}
MAY_SUBSCRIBE: dict[str, set[str]] = {
    **{f"_INBOX.{role}.>": {role} for role in ROLES},
    "_INBOX.>": set(),
    ">": set(),
    f"towline.{RUN}.>": set(),
    f"towline.{RUN}.control.>": set(),
    f"towline.{RUN}.trajectory.>": set(),
    f"towline.{RUN}.policy.opened": {TRAINER, WORKER, BUFFER, GATEWAY},
    f"towline.{RUN}.policy.committed": {TRAINER, WORKER, BUFFER, GATEWAY},
    f"towline.{RUN}.policy.refused": {TRAINER},
    f"towline.{RUN}.policy.staged": set(),
    f"towline.{RUN}.serve.w0": {WORKER},
    f"towline.{RUN}.serve.w0.cancel": {WORKER},
    f"towline.{RUN}.serve.>": {WORKER},  # the server takes it for one of serve.*; there is nothing else below
    "$JS.API.>": set(),
    "$KV.>": set(),
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder = tmp_path_factory.mktemp("guarded")
    accounts = [
        Account("first", [RUN], bus_users(folder / "first", ROLES)),
        Account("second", [RUN], bus_users(folder / "second", ROLES)),
        Account("third", [RUN], bus_users(folder / "third", ROLES)),
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
async def test_a_role_may_publish_what_is_its_own_and_nothing_else(guarded: NatsServer, role: str) -> None:
    refused: list[str] = []
    client = await raw(guarded, role, refused)
    for subject in MAY_PUBLISH:
        # A body that no JetStream request takes: what is allowed is answered with an error, and changes nothing.
        await client.publish(subject, b"not JSON")
    found = await refusals(client, refused, "publish", MAY_PUBLISH)
    await client.close()
    assert found == {subject for subject, roles in MAY_PUBLISH.items() if role not in roles}


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
