"""What is published stands once, whoever races for it and whatever is lost on the way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path

import pytest

from support.proxy import proxied
from support.servers import running
from support.waiting import until
from towline.bus.client import Bus
from towline.bus.topology import DEAD, OUTCOME, PARTIAL, POLICY, TRAJECTORY
from towline.config import BusSettings, StoreSettings
from towline.contract.codec import digest, encode
from towline.contract.policy import Committed, Opened
from towline.errors import CorruptError, FullError, MissingError, UnavailableError, UsageError
from towline.local.servers import NatsServer
from towline.store.blobs import Blobs
from towline.store.objects import ObjectStore, open_store


@pytest.fixture
async def other(bus: Bus, bus_settings: BusSettings) -> AsyncIterator[Bus]:
    """A second client of the same run."""
    other = await Bus.connect(bus_settings, run=bus.topology.run, client_name="other")
    yield other
    await other.close()


async def test_one_of_two_creators_wins_and_the_other_sees_what_stands(bus: Bus, other: Bus) -> None:
    for group in range(40):
        subject = bus.topology.trajectory(group, 0)
        mine, theirs = await asyncio.gather(bus.create(subject, b"mine"), other.create(subject, b"theirs"))
        assert mine.won != theirs.won
        winner = b"mine" if mine.won else b"theirs"
        assert (theirs if mine.won else mine).existing == winner
        assert mine.sequence == theirs.sequence
        stored = await bus.last(TRAJECTORY, subject)
        assert stored is not None
        assert stored.data == winner
    assert (await bus.stream_state(TRAJECTORY)).messages == 40


async def test_creating_the_same_bytes_again_is_a_win(bus: Bus, other: Bus) -> None:
    subject = bus.topology.score(1, 1)
    first = await bus.create(subject, b"score")
    again = await other.create(subject, b"score")
    assert first == again == (first.sequence, True, None)


async def test_a_group_of_creations_is_taken_whole_by_one(bus: Bus, other: Bus) -> None:
    for group in range(20):
        subjects = [bus.topology.score(group, sample) for sample in range(8)]
        mine = bus.create_all([(subject, b"mine") for subject in subjects])
        theirs = other.create_all([(subject, b"theirs") for subject in reversed(subjects)])
        answers = await asyncio.gather(mine, theirs)
        assert [answer is None for answer in answers].count(True) == 1
        found = [await bus.last(OUTCOME, subject) for subject in subjects]
        assert {message.data for message in found if message} == {b"mine" if answers[0] else b"theirs"}
        assert sorted(message.sequence for message in found if message) == sorted(answers[0] or answers[1] or [])
    assert (await bus.stream_state(OUTCOME)).messages == 160


async def test_a_group_that_is_partly_taken_is_refused_whole(bus: Bus) -> None:
    await bus.create(bus.topology.score(1, 3), b"early")
    assert await bus.create_all([(bus.topology.score(1, sample), b"late") for sample in range(8)]) is None
    assert (await bus.stream_state(OUTCOME)).messages == 1


@pytest.mark.parametrize("how", ["create", "create_all", "publish"])
async def test_a_lost_answer_is_neither_a_loss_nor_a_second_message(bus: Bus, bus_settings: BusSettings, how: str) -> None:
    subject = bus.topology.score(7, 0)
    async with proxied(bus_settings.url) as proxy:
        far = await Bus.connect(bus_settings.model_copy(update={"url": proxy.url}), run=bus.topology.run, client_name="far")
        proxy.swallow = True
        calls: dict[str, Callable[[], Coroutine[None, None, object]]] = {
            "create": lambda: far.create(subject, b"score"),
            "create_all": lambda: far.create_all([(subject, b"score"), (bus.topology.score(7, 1), b"b")]),
            "publish": lambda: far.publish(subject, b"score"),
        }
        sending: asyncio.Task[object] = asyncio.create_task(calls[how]())

        async def arrived() -> bool:
            return await bus.last(OUTCOME, subject) is not None and proxy.swallowed_bytes > 0

        await until(arrived)
        assert not sending.done()
        proxy.swallow = False
        proxy.cut()
        answer = await asyncio.wait_for(sending, 60.0)
        assert answer == {"create": (1, True, None), "create_all": [1, 2], "publish": 1}[how]
        await far.close()
    assert (await bus.stream_state(OUTCOME)).messages == (2 if how == "create_all" else 1)


async def test_sigkill_of_the_server_loses_nothing_acknowledged(
    mortal: BusSettings, mortal_server: NatsServer, run_name: str
) -> None:
    bus = await Bus.connect(mortal, run=run_name, client_name="test")
    await bus.ensure()
    acknowledged: dict[int, bytes] = {}

    async def sender(lane: int) -> None:
        for number in range(300):
            data = f"{lane}.{number}".encode() * 200
            created = await bus.create(bus.topology.trajectory(lane, number), data)
            assert created.won
            acknowledged[created.sequence] = data

    async with asyncio.TaskGroup() as group:
        for lane in range(8):
            group.create_task(sender(lane))
        for threshold in (400, 1200):
            await until(lambda wanted=threshold: len(acknowledged) >= wanted)  # type: ignore[misc]
            await asyncio.to_thread(mortal_server.kill)
            await asyncio.to_thread(mortal_server.start)
    stored = {message.sequence: message.data async for message in bus.read(TRAJECTORY, follow=False)}
    assert stored == acknowledged
    assert len(stored) == 2400
    await bus.close()


async def test_a_bus_that_stays_away_is_an_error_within_the_patience(
    mortal: BusSettings, mortal_server: NatsServer, run_name: str
) -> None:
    bus = await Bus.connect(mortal, run=run_name, client_name="test", patience_seconds=1.0)
    await bus.ensure()
    await asyncio.to_thread(mortal_server.kill)
    await until(lambda: not bus.connected)
    calls = [
        bus.publish(bus.topology.dead("x"), b""),
        bus.create(bus.topology.score(1, 1), b""),
        bus.last(OUTCOME, bus.topology.score(1, 1)),
    ]
    async with asyncio.timeout(4):
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(answer, UnavailableError), answer
            assert mortal.url in str(answer)
    await asyncio.to_thread(mortal_server.start)
    await until(lambda: bus.connected)
    assert await bus.publish(bus.topology.dead("x"), b"late") == 1
    await bus.close()


async def test_a_full_stream_is_back_pressure_then_goes_on(bus_settings: BusSettings, run_name: str) -> None:
    small = bus_settings.model_copy(update={"budget_bytes": 64 << 20})
    bus = await Bus.connect(small, run=run_name, client_name="test", patience_seconds=0.5)
    await bus.ensure()
    room = (await bus.stream_state(TRAJECTORY)).max_bytes
    count = room // 200_300
    for number in range(count):
        await bus.create(bus.topology.trajectory(number, 0), b"x" * 200_000)
    with pytest.raises(FullError, match="maximum bytes exceeded"):
        await bus.create(bus.topology.trajectory(count, 0), b"x" * 200_000)
    assert (await bus.stream_state(TRAJECTORY)).messages == count
    bus.jetstream.patience_seconds = 10.0
    waiting = asyncio.create_task(bus.create(bus.topology.trajectory(count, 0), b"x" * 200_000))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await bus.jetstream.call("purge", f"STREAM.PURGE.{bus.topology.stream(TRAJECTORY)}", {"seq": 3})
    assert (await waiting).won
    await bus.close()


async def test_a_partial_replaces_its_own_subject_only(bus: Bus) -> None:
    for text in (b"one", b"two", b"three"):
        await bus.publish(bus.topology.partial(1, 2), text)
    await bus.publish(bus.topology.partial(1, 3), b"other")
    assert (await bus.stream_state(PARTIAL)).messages == 2
    last = await bus.last(PARTIAL, bus.topology.partial(1, 2))
    assert last is not None
    assert last.data == b"three"


@pytest.fixture
def objects(file_store_settings: StoreSettings) -> ObjectStore:
    return open_store(file_store_settings)


async def test_a_payload_over_max_payload_comes_back_whole_on_every_way(
    bus_settings: BusSettings, run_name: str, objects: ObjectStore
) -> None:
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test", blobs=Blobs(objects, run_name))
    await bus.ensure()
    sizes = [bus.max_payload - 600, bus.max_payload - 100, bus.max_payload, 2 * bus.max_payload + 1]
    payloads = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    for sample, payload in enumerate(payloads):
        assert (await bus.create(bus.topology.trajectory(1, sample), payload)).won
        assert (await bus.create(bus.topology.trajectory(1, sample), payload)).won
        lost = await bus.create(bus.topology.trajectory(1, sample), b"other")
        assert (lost.won, lost.existing) == (False, payload)
    state = await bus.stream_state(TRAJECTORY)
    assert state.bytes < bus.max_payload + 2000, "only the first one fits a message"
    assert [message.data async for message in bus.read(TRAJECTORY, follow=False)] == payloads
    assert [message.data for message in await bus.get_many(TRAJECTORY, range(1, 5)) if message] == payloads
    reward = await bus.consumer(bus.topology.reward_consumer())
    deliveries = await reward.fetch(10, 1.0)
    assert [delivery.data for delivery in deliveries] == payloads
    assert await bus.create_all([(bus.topology.score(1, i), payload) for i, payload in enumerate(payloads)])
    assert [message.data async for message in bus.read(OUTCOME, follow=False)] == payloads
    await bus.close()


async def test_a_blob_with_other_bytes_is_never_handed_out(
    bus_settings: BusSettings, run_name: str, objects: ObjectStore
) -> None:
    class LyingBlobs(Blobs):
        def get(self, name: bytes) -> bytes:
            return super().get(name)[:-1] + b"!"

    bus = await Bus.connect(bus_settings, run=run_name, client_name="test", blobs=LyingBlobs(objects, run_name))
    await bus.ensure()
    payload = b"p" * (bus.max_payload + 1)
    created = await bus.create(bus.topology.trajectory(1, 0), payload)
    with pytest.raises(CorruptError, match=digest(payload).hex()):
        await bus.get(TRAJECTORY, created.sequence)
    await bus.close()


async def test_without_a_blob_store_a_large_payload_is_refused_and_the_connection_lives(bus: Bus) -> None:
    with pytest.raises(UsageError, match="no blob store"):
        await bus.publish(bus.topology.dead("x"), b"x" * (bus.max_payload + 1))
    assert await bus.publish(bus.topology.dead("x"), b"small") == 1


async def test_what_is_missing_is_an_error_for_one_and_none_among_many(bus: Bus) -> None:
    sequence = await bus.publish(bus.topology.dead("x"), b"here")
    with pytest.raises(MissingError, match="no message 99"):
        await bus.get(DEAD, 99)
    with pytest.raises(MissingError, match="no message 99"):
        await bus.get(DEAD, 99, leader=True)
    found = await bus.get_many(DEAD, [99, sequence, 98])
    assert [message and message.data for message in found] == [None, b"here", None]


async def test_dead_letters_keep_the_message_and_the_reason(bus: Bus) -> None:
    await bus.dead("decode", b"\x00raw\xff", "not\na trajectory: é", sequence=7, subject="a.b")
    letter = await bus.get(DEAD, 1)
    assert letter.data == b"\x00raw\xff"
    assert letter.headers["Towline-Reason"] == "not a trajectory: é"
    assert letter.headers["Towline-Context"] == '{"sequence":7,"subject":"a.b"}'
    assert bus.topology.relative(letter.subject) == "dead.decode"


async def test_hints_arrive_and_an_unreadable_one_is_passed_over(bus: Bus, other: Bus) -> None:
    heard: list[object] = []

    async def listen() -> None:
        async with contextlib.aclosing(other.subscribe_hints("opened", "committed")) as hints:
            async for hint in hints:
                heard.append(hint)

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0.05)
    committed = Committed(number=3, epoch=1, write_id="w")
    for kind, data in [
        ("opened", encode(Opened(epoch=1))), ("opened", b"rubbish"), ("staged", b""), ("committed", encode(committed)),
    ]:  # fmt: skip
        await bus.publish(bus.topology.policy(kind), data)
    await until(lambda: len(heard) == 2)
    assert heard == [Opened(epoch=1), committed]
    assert (await bus.stream_state(POLICY)).messages == 4
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


LIMITED_USER = """
authorization { users: [
  { user: limited, password: "right", permissions: {
      publish: ["$JS.API.STREAM.INFO.>", "towline.*.outcome.>"], subscribe: ["_INBOX.limited.>"] } }
  { user: all, password: "all" }
] }
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    yield from running(NatsServer(Path(tmp_path_factory.mktemp("guarded-nats")), authorization=LIMITED_USER))


async def test_a_refused_permission_is_told_at_once_with_the_servers_reason(guarded: NatsServer, run_name: str) -> None:
    full = BusSettings.model_validate({"user": "all", "password": "all", "budget_bytes": 64 << 20})
    owner = await Bus.connect(guarded.settings(full), run=run_name, client_name="owner")
    await owner.ensure()
    limited = BusSettings.model_validate({"user": "limited", "password": "right", "budget_bytes": 64 << 20})
    bus = await Bus.connect(guarded.settings(limited), run=run_name, client_name="limited")
    await bus.ensure()
    subject = bus.topology.control("batch")
    async with asyncio.timeout(10):
        with pytest.raises(UsageError, match=f"refuses user limited to publish to {subject}"):
            await bus.publish(subject, b"forged")
        with pytest.raises(UsageError, match=r"refuses user limited to publish to \$JS\.API\.CONSUMER"):
            await bus.consumer(bus.topology.reward_consumer())
    assert await bus.publish(bus.topology.failure(1, 1), b"allowed") == 1
    await bus.close()
    await owner.close()


async def test_a_wrong_password_is_a_usage_error_that_keeps_the_password(guarded: NatsServer, run_name: str) -> None:
    settings = guarded.settings(BusSettings.model_validate({"user": "limited", "password": "wrong-secret"}))
    in_url = BusSettings(url=guarded.url.replace("nats://", "nats://limited:wrong-secret@"))
    for wrong in (settings, in_url):
        with pytest.raises(UsageError, match=f"{guarded.url} refuses the user") as caught:
            await Bus.connect(wrong, run=run_name, client_name="x")
        assert "wrong-secret" not in str(caught.value)


async def test_an_address_where_nobody_listens_is_one_clear_line(run_name: str) -> None:
    settings = BusSettings(url="nats://127.0.0.1:9", connect_timeout_seconds=0.5)
    async with asyncio.timeout(5):
        with pytest.raises(UnavailableError, match=r"nats://127\.0\.0\.1:9 can't be reached: .*correct bus\.url") as caught:
            await Bus.connect(settings, run=run_name, client_name="x")
    assert "\n" not in str(caught.value)


async def test_a_budget_that_does_not_fit_is_refused_with_the_way_out(tmp_path: Path, run_name: str) -> None:
    for server in running(NatsServer(tmp_path / "nats", max_store_bytes=100 << 20)):
        settings = server.settings(BusSettings(budget_bytes=1 << 30))
        bus = await Bus.connect(settings, run=run_name, client_name="x")
        with pytest.raises(UsageError, match=r"bus\.budget_bytes = 1073741824 has no room .*max_file_store"):
            await bus.ensure()
        await bus.close()


async def test_ensure_is_idempotent_and_follows_a_changed_budget(bus: Bus, bus_settings: BusSettings) -> None:
    before = await bus.stream_state(TRAJECTORY)
    await bus.ensure()
    assert await bus.stream_state(TRAJECTORY) == before
    larger = bus_settings.model_copy(update={"budget_bytes": 2 * bus_settings.budget_bytes})
    again = await Bus.connect(larger, run=bus.topology.run, client_name="again")
    await asyncio.gather(*(again.ensure() for _ in range(4)))
    after = await bus.stream_state(TRAJECTORY)
    assert after.created_at == before.created_at
    assert after.max_bytes > 2 * before.max_bytes
    await again.close()
