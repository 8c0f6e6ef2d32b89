"""Claimed sessions that become no trajectory: the sample goes back once, for the right reason, and its task with it."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from live.gateway.conftest import Scene
from live.gateway.test_claims import BUFFER, admit, claim, claimed, failures, only_trajectory, settled, task_of
from live.gateway.test_sessions import Talk, one_line, seed_chat
from support.waiting import until
from towline.bus.topology import SESSIONS
from towline.contract.codec import encode
from towline.contract.control import ReissueRecord
from towline.contract.task import SESSION
from towline.gateway import session_store
from towline.gateway.session_store import Finish


@pytest.mark.parametrize("how", ["deleted", "left"])
async def test_a_session_that_is_given_up_is_a_failure_and_the_sample_can_be_claimed_again(scene: Scene, how: str) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    client = await scene.gateway(buffer=BUFFER, sessions={"keep_seconds": 0.2})
    sequence = await admit(scene, 3)
    talk, _ = await claimed(client, scene.world.run, ttl_seconds=1.0 if how == "left" else None)
    await talk.ask("hi")
    if how == "deleted":
        (await client.delete(f"/sessions/{talk.name}")).raise_for_status()

    async def gone() -> bool:
        return bool(await failures(scene))

    await until(gone)
    await settled(scene)
    (failure,) = await failures(scene)
    assert (failure.stage, failure.final, failure.task_sequence, failure.delivery) == ("abandoned", False, sequence, 1)
    assert (failure.lane, failure.group, failure.sample) == (SESSION, 3, 0)
    if how == "left":

        async def ended() -> bool:
            return bool((await talk.view())["state"] == "ended")

        await until(ended)
    talk.messages.append({"role": "user", "content": "still there?"})
    one_line(await talk.send(), *((404, talk.name) if how == "deleted" else (409, "ended", "unchanged")))
    again = ReissueRecord(writer=scene.world.stamp(), task=task_of(scene, 3, attempt=1), reason="abandoned")
    await scene.world.append(again, scene.world.bus.topology.reissue(SESSION))
    other, second = await claimed(client, scene.world.run)
    assert second["task"]["attempt"] == 1
    assert other.name != talk.name
    assert await scene.world.trajectories() == {}


async def test_every_gateway_keeps_every_claim_and_a_task_delivered_again_finds_its_session(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    short = {"ack_wait_seconds": 1.0}
    first = await scene.gateway(buffer=BUFFER, rollout=short)
    second = await scene.gateway(buffer=BUFFER, rollout=short)

    async def adopted() -> float:
        lines = [line.split() for line in (await second.get("/metrics")).text.splitlines() if "claims_adopted_total" in line]
        return float(lines[-1][1])

    await admit(scene, 1)
    talk, _ = await claimed(first, scene.world.run)
    running = scene._gateways[0][1]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    for _ in range(3):
        assert (await claim(second)).status_code == 204, "it's the first client's, who may come by any gateway"
        await asyncio.sleep(0.5)
    assert await adopted() == 0, "the other gateway's signs of life keep it"
    talk.client = second
    await talk.ask("hi")
    keeper = scene._gateways[1][0]._keeper
    keeper.look = lambda: asyncio.sleep(0)  # type: ignore[method-assign]

    async def again() -> bool:
        assert (await claim(second)).status_code == 204
        return await adopted() > 0

    await until(again)
    await talk.ask("more")
    (await talk.post("finish")).raise_for_status()
    await settled(scene)
    assert len(await scene.world.trajectories()) == 1
    assert await failures(scene) == []


async def test_a_task_that_the_buffer_takes_back_ends_its_session_without_a_failure(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    client = await scene.gateway(buffer=BUFFER, sessions={"keep_seconds": 0.2})
    sequence = await admit(scene, 1)
    talk, _ = await claimed(client, scene.world.run)
    await talk.ask("hi")
    await scene.world.cancel(1, 0, sequence)
    await settled(scene)
    talk.messages.append({"role": "user", "content": "more"})
    one_line(await talk.send(), 409, "taken its task back")
    one_line(await talk.post("finish"), 409, "taken its task back", "claim another")
    late = await admit(scene, 2)
    await scene.world.cancel(2, 0, late)
    await asyncio.sleep(0.5)
    assert (await claim(client)).status_code == 204, "one that was taken back before anybody claimed it is given to nobody"
    assert (await scene.world.trajectories(), await failures(scene)) == ({}, [])


async def test_a_session_that_has_become_too_old_to_be_trained_is_a_failure(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    client = await scene.gateway(buffer=BUFFER | {"max_staleness": 0})
    await admit(scene, 1)
    await admit(scene, 2)
    talk, _ = await claimed(client, scene.world.run)
    fresh, _ = await claimed(client, scene.world.run)
    await talk.ask("hi")
    version = scene.world.commit(1)
    await scene.world.served(version)

    async def seen() -> bool:
        return bool((await client.get("/server_info")).json()["latest_version"] == version)

    await until(seen)
    one_line(await talk.post("finish"), 409, "too old")
    (failure,) = await failures(scene)
    assert failure.stage == "stale"
    await fresh.ask("hi")
    done = (await fresh.post("finish")).raise_for_status().json()
    assert done["weight_version_start"] == version, "one that hasn't begun isn't old"


async def test_where_another_attempt_was_finished_first_the_session_is_over_and_nothing_is_told_twice(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    client = await scene.gateway(buffer=BUFFER, sessions={"keep_seconds": 0.2})
    await admit(scene, 1)
    talk, _ = await claimed(client, scene.world.run)
    await talk.ask("hi")
    again = ReissueRecord(writer=scene.world.stamp(), task=task_of(scene, 1, attempt=1), reason="lost")
    await scene.world.append(again, scene.world.bus.topology.reissue(SESSION))
    other, _ = await claimed(client, scene.world.run)
    await other.ask("ho")
    (await other.post("finish")).raise_for_status()
    for _ in range(2):
        one_line(await talk.post("finish"), 409, "finished first", "claim another")
    await settled(scene)
    found = await only_trajectory(scene)
    assert found.attempt == 1
    assert await failures(scene) == []


async def test_entries_that_nobody_can_read_hold_up_no_other(scene: Scene) -> None:
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    await scene.world.bus.kv(SESSIONS).put("sess-" + "0" * 32, b"nonsense")
    client = await scene.gateway(buffer=BUFFER, sessions={"keep_seconds": 0.2})
    await admit(scene, 1)
    await admit(scene, 2)
    broken, _ = await claimed(client, scene.world.run)
    await broken.ask("hi")
    store = scene._gateways[0][0]._sessions
    held = await store.load(broken.name, "-")
    finish = Finish(name="-/", sample=0, group_size=2, reference={}, at=1.0)
    content = msgspec.structs.replace(held.content, session=held.content.session[:-3], state="finishing", finish=finish)
    entry = await store._entry_of(held.id, "-", content, 60.0)
    old = msgspec.structs.replace(entry, expires_at=time.time() + 50.0)
    assert await store.bucket.update(held.id, encode(old), held.revision) is not None
    left, _ = await claimed(client, scene.world.run, ttl_seconds=0.3)

    async def told() -> bool:
        return {(one.group, one.stage) for one in await failures(scene)} == {(1, "malformed"), (2, "abandoned")}

    await until(told)
    await settled(scene)
    assert left.name != broken.name


async def test_what_is_settled_answers_for_a_while_and_then_leaves_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_store, "SETTLED_SECONDS", 1.5)
    seed_chat(scene)
    await scene.worker(engine="synthetic")
    client = await scene.gateway(buffer=BUFFER, sessions={"keep_seconds": 0.2})
    await admit(scene, 1)
    told = (await client.post("/tasks/claim", json={}, headers={"Idempotency-Key": "k", "Prefer": "wait=9"})).json()
    talk = Talk(client, scene.world.run, told["id"])
    await talk.ask("hi")
    done = (await talk.post("finish")).raise_for_status().json()
    bucket = scene.world.bus.kv(SESSIONS)
    assert len((await bucket.items())[talk.name]) < 500, "what stands of a settled one is small"
    assert (await talk.post("finish")).json() == done

    async def gone() -> bool:
        return await bucket.items() == {}

    await until(gone)
    one_line(await talk.post("finish"), 404, talk.name)
    assert not list(scene.world.objects.list(f"{scene.world.run}/sessions/"))
    assert len(await scene.world.trajectories()) == 1
